"""The HTTP API: OpenAI's endpoints on starlette.

Owns wire formats, validation, authorization and streaming. Does not own generation: it asks the engine through
`engine_api`. Surprising rule: nothing in here knows a slot, a graph or a frame.
"""
