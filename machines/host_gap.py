"""What the host adds to a frame that had to wait for the one before it.

Owns the measured gap (docs/scheduling.md, "Host gap"). Does not own whether it has a price. Surprising rule: only a
frame that was dispatched in the very instant of a completion tells: before any other, nobody may have asked for work.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from .durations import WINDOW_SAMPLES
from .slot import Execute, Submit


class HostGap:
    """`ms` is the median of the last samples, 0 until there is one."""

    __slots__ = ("_ended_ns", "_samples", "ms")

    def __init__(self) -> None:
        self.ms = 0.0
        self._samples: deque[int] = deque(maxlen=WINDOW_SAMPLES)
        self._ended_ns = -1

    def observe(self, submit: Submit, execute: Execute) -> None:
        """A frame ended."""
        follows = submit.isolated and submit.at_ns == self._ended_ns
        self._ended_ns = execute.at_ns
        if follows and execute.device_ns > 0:
            self._samples.append(max(0, execute.at_ns - submit.at_ns - execute.device_ns))
            self.ms = median(self._samples) / 1e6
