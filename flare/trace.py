"""Where the trace is written (docs/observability.md, "Trace").

Owns the writer: JSON lines, encoded and written by a thread of its own. Does not own the events
(`flare/trace_events`) or the log for people (`flare/log`). Surprising rule: `emit` only appends to a bounded queue, so
that a trace costs the event loop next to nothing; when the disk is slower than the scheduler, events are lost, and a
`trace.dropped` line says how many.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from .trace_events import TraceDropped, TraceOpened

FLUSH_PERIOD_S = 0.25
CAPACITY = 16_384
"""Events that may wait for the disk: more than a second of the busiest scheduler."""

_BYTES_PER_WRITE = 1 << 20
_STDERR = 2


class TraceWriter:
    """Writes events as JSON lines to open file descriptors, which it closes (but for the standard streams).

    Lines are written whole and in order, within `FLUSH_PERIOD_S` of their event, and all of them by `close` or the end
    of the process. A descriptor that fails is given up, and the log says so.
    """

    def __init__(self, descriptors: Sequence[int], *, capacity: int = CAPACITY) -> None:
        self._descriptors = list(descriptors)
        self._capacity = capacity
        self._waiting: deque[object] = deque()
        self._dropped = 0
        self._stopping = threading.Event()
        self._encoder = msgspec.json.Encoder(enc_hook=repr)
        self.emit(TraceOpened(at_ns=time.monotonic_ns(), wall_ns=time.time_ns()))
        self._thread = threading.Thread(target=self._run, name="flare-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def echoes(self) -> bool:
        """Whether lines go to standard error as well; not any more once closed."""
        return _STDERR in self._descriptors

    def emit(self, event: object) -> None:
        """Queue an event: a record of `flare/trace_events`, or anything that goes to JSON. It must not change later."""
        if len(self._waiting) >= self._capacity:
            self._dropped += 1
            return
        if self._dropped:
            self._waiting.append(TraceDropped(events=self._dropped))
            self._dropped = 0
        self._waiting.append(event)

    def close(self) -> None:
        """Write what waits and close. Idempotent; nothing may be emitted afterwards."""
        atexit.unregister(self.close)
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        if self._dropped:
            self._write(self._encode(TraceDropped(events=self._dropped)))
        for descriptor in self._descriptors:
            if descriptor > _STDERR:
                os.close(descriptor)
        self._descriptors.clear()

    def _run(self) -> None:
        while not self._stopping.wait(FLUSH_PERIOD_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines = bytearray()
        while self._waiting:
            lines += self._encode(self._waiting.popleft())
            if len(lines) >= _BYTES_PER_WRITE:
                self._write(lines)
                lines.clear()
        if lines:
            self._write(lines)

    def _encode(self, event: object) -> bytes:
        try:
            return self._encoder.encode(event) + b"\n"
        except (TypeError, ValueError) as error:  # such as a lone surrogate in a log line: keep the line, in ASCII
            return self._encoder.encode({"event": "trace.unencodable", "error": str(error), "of": ascii(event)}) + b"\n"

    def _write(self, lines: bytes | bytearray) -> None:
        for descriptor in tuple(self._descriptors):
            try:
                rest = memoryview(bytes(lines))
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError as error:
                self._descriptors.remove(descriptor)
                structlog.get_logger().error("trace.failed", error=str(error), descriptor=descriptor)


def open_trace(path: Path | None, *, to_stderr: bool = False) -> TraceWriter | None:
    """A writer to a new file at `path` and, if asked for, to standard error; None if to neither.

    Raises OSError where the file cannot be made.
    """
    descriptors = []
    if path is not None:
        descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644))
    if to_stderr:
        descriptors.append(_STDERR)
    return TraceWriter(descriptors) if descriptors else None
