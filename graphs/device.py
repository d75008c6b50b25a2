"""The device protocol: what the engine asks of `cpu` and `sim`.

Owns the contract alone. A device prepares graphs, accepts submitted frames, and calls back exactly once for each, in
order of submission. Surprising rule: the callback runs on the device's own thread; whoever receives it only hands the
completion on to its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flare.machines.graph import GraphShape

from .frames import Completion, Frame

OnCompletion = Callable[[Completion], None]
OnProgress = Callable[[GraphShape, int, int], None]
"""Called with the graph just prepared, how many are prepared, and how many there are."""


class Device(Protocol):
    """Runs prepared graphs. At most two frames are in flight; the engine keeps to that."""

    @property
    def request_slots(self) -> int:
        """State rows: a lane's slot is below this."""
        ...

    @property
    def pages(self) -> int:
        """Pages of the KV cache, numbered from 0."""
        ...

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        ...

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """Allocate all buffers and make every graph of the catalog ready; blocks. Called once."""
        ...

    def start(self, on_completion: OnCompletion) -> None:
        """Begin to accept frames. The callback must not raise and must not block."""
        ...

    def submit(self, frame: Frame) -> None:
        """Queue a frame and return at once. Raises `DeviceLost` if the device has died."""
        ...

    def close(self) -> None:
        """Finish what is in flight, stop the thread and free everything. Idempotent."""
        ...


class DeviceLost(RuntimeError):
    """The device can run no further frame; the message says why."""
