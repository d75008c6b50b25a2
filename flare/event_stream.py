"""Reading server-sent events, for the clients `flare chat` and `flare bench`.

Owns the cutting of bytes into events. Does not own what is in them. Surprising rule: lines end at a line feed and
nowhere else: text may hold other line separators of Unicode.
"""

from __future__ import annotations

DONE = b"[DONE]"
"""The data of the last event of an OpenAI-style stream."""


class EventSplitter:
    """Gives the data of each event once its line is whole. One `data:` line is one event, as OpenAI sends them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` ends, in order; comments and other fields are passed over."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    @property
    def rest(self) -> bytes:
        """What came after the last whole line: all of a one-line body that is no event stream."""
        return self._rest
