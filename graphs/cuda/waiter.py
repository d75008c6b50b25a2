"""The thread that waits for the card.

Owns the queue between `submit` and completions, and the promise of one completion per frame, in order. Does not know
CUDA. Surprising rule: frames that were refused go through the same queue, so that their completions too come in order
and from this thread alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..device import OnCompletion
from ..frames import Completion

Flight = TypeVar("Flight")


class Waiter(Generic[Flight]):
    """Calls `complete`, which blocks, on its own thread for each flight. It must not raise."""

    def __init__(self, complete: Callable[[Flight], Completion], on_completion: OnCompletion) -> None:
        self._complete = complete
        self._on_completion = on_completion
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="flare-cuda-waiter", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still takes flights."""
        return not self._closed and self._thread.is_alive()

    def put(self, flight: Flight) -> None:
        """Queue a flight."""
        self._flights.put(flight)

    def close(self) -> None:
        """Finish what is queued and stop the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._flights.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (flight := self._flights.get()) is not None:
            self._on_completion(self._complete(flight))
