"""When requests arrive: at the times of a trace, or each when the one before it has ended.

Owns the outcomes of a run and the order in which they come to be. Does not own time: a server asks what is due.
Surprising rule: what a stream of the closed loop asks next is fixed by the seed, the stream and its number in it, never
by when it is asked, so that servers of different speed are asked the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from random import Random
from typing import Protocol

from .outcome import NS_PER_S, Outcome
from .traces import TraceRequest

LENGTHS = (256, 512)
"""Prompts and outputs of the closed loop, in tokens: uniform between these."""


class Arrivals(Protocol):
    """The requests of one run."""

    outcomes: list[Outcome]
    """In order of arrival: all of a trace, those that have arrived of a closed loop."""

    longest_prompt: int
    """In tokens."""

    def next_ns(self) -> int | None:
        """When the next arrives, as far as is known; None: none does."""
        ...

    def take(self, now_ns: int) -> Iterator[tuple[int, Outcome]]:
        """Those that have arrived by now and were not taken yet, each with its place in `outcomes`."""
        ...

    def ended(self, now_ns: int, outcome: Outcome) -> None:
        """A request has its last token, or was refused."""
        ...

    def share(self, now_ns: int) -> float:
        """How much of the load has arrived, 0 to 1."""
        ...


class OpenLoop:
    """Requests at their own times, in whose order they are given."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.outcomes = [Outcome(request) for request in requests]
        self.longest_prompt = max((outcome.request.prompt_tokens for outcome in self.outcomes), default=0)
        self._place = 0

    def next_ns(self) -> int | None:
        """See `Arrivals`."""
        return self.outcomes[self._place].arrival_ns if self._place < len(self.outcomes) else None

    def take(self, now_ns: int) -> Iterator[tuple[int, Outcome]]:
        """See `Arrivals`."""
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            self._place += 1
            yield self._place - 1, self.outcomes[self._place - 1]

    def ended(self, now_ns: int, outcome: Outcome) -> None:
        """Others do not wait for it."""

    def share(self, now_ns: int) -> float:
        """See `Arrivals`."""
        return self._place / max(1, len(self.outcomes))


class ClosedLoop:
    """So many `streams`, each of which asks anew when it has been answered, until the window is over."""

    longest_prompt = LENGTHS[1]

    def __init__(self, streams: int, window_s: float, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self._window_ns, self._seed = round(window_s * NS_PER_S), seed
        self._due = [(0, stream) for stream in range(streams)]
        self._asked = [0] * streams
        self._stream_of: dict[TraceRequest, int] = {}

    def next_ns(self) -> int | None:
        """See `Arrivals`."""
        return self._due[0][0] if self._due else None

    def take(self, now_ns: int) -> Iterator[tuple[int, Outcome]]:
        """See `Arrivals`."""
        while self._due and self._due[0][0] <= now_ns:
            at_ns, stream = heapq.heappop(self._due)
            self._asked[stream] += 1
            rng = Random(f"{self._seed}/{stream}/{self._asked[stream]}")
            prompt, output = rng.randint(*LENGTHS), rng.randint(*LENGTHS)
            request = TraceRequest(at_ns / NS_PER_S, prompt, output, seed=rng.getrandbits(62))
            self._stream_of[request] = stream
            self.outcomes.append(Outcome(request))
            yield len(self.outcomes) - 1, self.outcomes[-1]

    def ended(self, now_ns: int, outcome: Outcome) -> None:
        """See `Arrivals`."""
        stream = self._stream_of.pop(outcome.request)
        if now_ns < self._window_ns:
            heapq.heappush(self._due, (now_ns, stream))

    def share(self, now_ns: int) -> float:
        """See `Arrivals`."""
        return min(1.0, now_ns / self._window_ns)
