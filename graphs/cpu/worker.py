"""One thread that runs frames in order.

Owns the queue between `submit` and the programs, and the promise of one completion per frame. Does not know models.
Surprising rule: a frame that raises is completed with the error's words, and the thread goes on; only `close` ends it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..device import DeviceLost, OnCompletion
from ..frames import Completion, Frame

RunFrame = Callable[[Frame], Completion]


class Worker:
    """Runs `run` over submitted frames on its own thread."""

    def __init__(self, run: RunFrame, on_completion: OnCompletion) -> None:
        self._run = run
        self._on_completion = on_completion
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="flare-cpu-device", daemon=True)
        self._thread.start()

    def submit(self, frame: Frame) -> None:
        """Queue a frame. Raises `DeviceLost` after `close`, or if the thread has died."""
        if self._closed or not self._thread.is_alive():
            raise DeviceLost("the CPU device is closed" if self._closed else "the CPU device's thread has died")
        self._frames.put(frame)

    def close(self) -> None:
        """Finish what is queued and stop the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._frames.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                completion = self._run(frame)
            except Exception as error:  # noqa: BLE001 - its requests hear of it, and the others go on
                completion = Completion(frame.fence, 0, (), f"{type(error).__name__}: {error}")
            self._on_completion(completion)
