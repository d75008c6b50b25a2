"""What the device asks of CUDA: a dozen calls, and nothing else.

Owns the protocol and the error of a failed call. `driver` makes it of torch and cuda-python; tests make it of a queue
and a thread. Surprising rule: `launch`, `run`, `copy`, `record` and `elapsed_ns` return at once, whatever the card is
doing; all others may block, and are not for the thread that submits frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Graph(Protocol):
    """A body that was captured and instantiated."""


class Event(Protocol):
    """A point in the stream, to be recorded again and again."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says of itself. Versions are (major, minor)."""

    name: str
    capability: tuple[int, int]
    driver: tuple[int, int]
    runtime: tuple[int, int]
    total_bytes: int


class CudaError(RuntimeError):
    """A call failed, or told of a failure before it. `lost`: the context can run nothing more; `memory`: there was not
    enough of it."""

    def __init__(self, call: str, name: str, text: str, *, lost: bool = False, memory: bool = False) -> None:
        super().__init__(f"{call}: {name}: {text}")
        self.call = call
        self.name = name
        self.lost = lost
        self.memory = memory


class Runtime(Protocol):
    """One card, its context, and one stream, on which everything below happens in order. All may raise `CudaError`."""

    torch_device: torch.device

    def facts(self) -> CardFacts:
        """What the card is."""
        ...

    def free_bytes(self) -> int:
        """Memory that nobody has taken."""
        ...

    def settle(self) -> None:
        """Wait for what torch was asked for beside the stream: weights and zeros on their way."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Zeroed uint8[nbytes] of the host, which the card reads and writes itself."""
        ...

    def capture(self, body: Callable[[], None]) -> Graph:
        """Run a body a few times aside, then capture it into the pool that all graphs share."""
        ...

    def launch(self, graph: Graph) -> None:
        """Replay a graph."""
        ...

    def run(self, body: Callable[[], None]) -> None:
        """Run a body as it is, kernel by kernel."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the card and pinned memory, contiguous tensors of as many bytes."""
        ...

    def event(self, *, timed: bool) -> Event:
        """An event that tells the time, or one that a thread can wait for without spinning."""
        ...

    def record(self, event: Event) -> None:
        """Have the event happen once all that was asked for before has been done."""
        ...

    def wait(self, event: Event) -> None:
        """Block the calling thread until it has happened, without the interpreter's lock."""
        ...

    def elapsed_ns(self, began: Event, ended: Event) -> int:
        """The time between two timed events that have happened."""
        ...

    def close(self) -> None:
        """Wait for what is under way and give everything back. Idempotent."""
        ...
