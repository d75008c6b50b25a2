"""The simulated device in real time: the same core, stepped by a thread on the monotonic clock.

Owns the pace. A frame that was queued in time starts where the frame before it ended, not where the thread woke, so
delays do not add up. Surprising rule: periods are measured between the moments at which the thread really began two
frames, so they include every delay that a busy process causes, and the gap before a frame that came too late.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flare.machines.graph import GraphShape

from ..device import DeviceLost, OnCompletion, OnProgress
from ..frames import Completion, Frame
from .core import SimCore

_PERIODS_MAX = 1_000_000


class Period(NamedTuple):
    """From the start of one frame to the start of the next. `queued`: the next one had been submitted in time."""

    period_ns: int
    queued: bool


class PacedDevice:
    """A `Device` (graphs/device.py) that draws synthetic tokens at the pace of `core`'s durations."""

    def __init__(self, core: SimCore) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._death: str | None = None
        self._undelivered: deque[Frame] = deque()
        self._periods: deque[Period] = deque(maxlen=_PERIODS_MAX)

    @property
    def request_slots(self) -> int:
        """State rows."""
        return self._core.request_slots

    @property
    def pages(self) -> int:
        """Pages of the imaginary KV cache."""
        return self._core.pages

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        return self._core.page_tokens

    @property
    def state_rows(self) -> int:
        """Rows that hold saved states."""
        return self._core.state_rows

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """Nothing is compiled; every shape is ready at once."""
        self._core.prepare(catalog)
        for done, shape in enumerate(catalog, start=1):
            progress(shape, done, len(catalog))

    def start(self, on_completion: OnCompletion) -> None:
        """Start the thread, which calls `on_completion`."""
        self._thread = threading.Thread(target=self._serve, args=(on_completion,), name="flare-sim-device", daemon=True)
        self._thread.start()

    def submit(self, frame: Frame) -> None:
        """Queue a frame now. Raises `DeviceLost` after `close` or death, `ValueError` as `SimCore.submit` does."""
        with self._wake:
            if self._closing:
                raise DeviceLost("the device is closed")
            if self._death is not None:
                raise DeviceLost(self._death)
            self._core.submit(frame, time.monotonic_ns())
            self._undelivered.append(frame)
            self._wake.notify()

    def close(self) -> None:
        """Finish what is in flight, in real time, and stop the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def periods(self) -> tuple[Period, ...]:
        """The periods measured so far, oldest first, at most the last million."""
        with self._wake:
            return tuple(self._periods)

    def _serve(self, on_completion: OnCompletion) -> None:
        """The thread: wait for a frame, wait for its end, deliver it."""
        last_begin_ns = last_end_ns = last_due_ns = 0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._undelivered or self._closing)
                if not self._undelivered:
                    return
                begin_ns = time.monotonic_ns()
                try:
                    start_ns, due_ns = self._core.run_head()
                except Exception as error:  # noqa: BLE001 - whatever broke, the device dies and says so
                    self._death = f"the simulated device died: {error}"
                    frames, self._undelivered = self._undelivered, deque()
                    break
                if last_begin_ns:
                    self._periods.append(Period(begin_ns - last_begin_ns, start_ns <= last_due_ns))
            last_begin_ns, last_due_ns = begin_ns, due_ns
            last_end_ns, device_from_ns = _sleep_until(due_ns), max(start_ns, last_end_ns)
            with self._wake:
                completion = self._core.finish(last_end_ns)
                self._undelivered.popleft()
            if completion.device_ns:
                completion = replace(completion, device_ns=max(1, last_end_ns - device_from_ns))
            on_completion(completion)
        for frame in frames:
            on_completion(Completion(frame.fence, 0, (), self._death, lost=True))


def _sleep_until(due_ns: int) -> int:
    """Sleep to an instant of the monotonic clock; returns the time of waking, never before it."""
    while (now_ns := time.monotonic_ns()) < due_ns:
        time.sleep((due_ns - now_ns) / 1e9)
    return now_ns
