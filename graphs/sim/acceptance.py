"""How many proposals the simulated target accepts: a process that a seed fixes.

Owns pure functions of (request, output position). Does not own the tokens, which are those of plain decoding whatever
is accepted. Surprising rule: nothing is remembered from round to round, so that the same position of the same request
accepts the same number in every schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .tokens import HASH_MASK, mix

_GOLDEN = 0x9E3779B97F4A7C15


class Acceptance(Protocol):
    """What a round asks. An implementation must be pure."""

    def __call__(self, request: int, output_index: int, drafts: int) -> int:
        """How many of the first `drafts` proposals that follow output token `output_index` (from 0) of the request
        whose 64-bit key is `request` are accepted, from 0 to `drafts`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedAcceptance:
    """Every round accepts `accepted` proposals, or all that it offers if they are fewer."""

    accepted: int

    def __post_init__(self) -> None:
        if self.accepted < 0:
            raise ValueError(f"accepted is {self.accepted}; it must be at least 0")

    def __call__(self, request: int, output_index: int, drafts: int) -> int:
        """See `Acceptance`."""
        return min(self.accepted, drafts)


@dataclass(frozen=True, slots=True)
class RandomAcceptance:
    """Each proposal of a request is accepted with the request's own probability, once those before it were.

    That probability is uniform in [mean - spread, mean + spread], cut to [0, 1]. `drift` is added to it for every 1,000
    output tokens (it may be negative), so that estimates have something to follow.
    """

    seed: int
    mean: float
    spread: float = 0.0
    drift: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= 1 or self.spread < 0:
            raise ValueError(f"mean is {self.mean} and spread {self.spread}; they must be in [0, 1] and at least 0")

    def probability(self, request: int, output_index: int) -> float:
        """The probability that holds for a round after output token `output_index`."""
        uniform = mix(request ^ mix(self.seed + 3)) / 2**64
        exact = self.mean + self.spread * (2 * uniform - 1) + self.drift * output_index / 1000
        return min(1.0, max(0.0, exact))

    def __call__(self, request: int, output_index: int, drafts: int) -> int:
        """See `Acceptance`."""
        probability = survival = self.probability(request, output_index)
        uniform = mix(mix(request + self.seed + 4 & HASH_MASK) + output_index * _GOLDEN & HASH_MASK) / 2**64
        accepted = 0
        while accepted < drafts and uniform < survival:
            accepted += 1
            survival *= probability
        return accepted
