"""The server: command line, HTTP API, engine, tokens, tracing and metrics."""
