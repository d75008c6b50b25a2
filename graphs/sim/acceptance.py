"""How many proposals the simulated target accepts: a process that a seed fixes.

Owns pure functions of (request, output position). Does not own the tokens, which are those of plain decoding whatever
is accepted. Surprising rule: nothing is remembered from round to round. Whether the proposal for a position is right is
settled before anybody offers it, so that the same position fares alike in every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Confidence(Protocol):
    """What a program that proposes thinks of its own proposals, before they are verified. It must be pure."""

    def __call__(self, request: int, output_index: int, drafts: int) -> Sequence[float]:
        """For each of those proposals, the probability (0 to 1) that it is right if those before it are."""
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
    """The proposal for each position of a request is right with the request's own probability.

    That probability is uniform in [mean - spread, mean + spread], cut to [0, 1]. `drift` is added to it for every 1,000
    output tokens (it may be negative), so that estimates have something to follow. The program's own `confidence` is
    calibrated: of the proposals that it gives a probability, that share is right. `insight` is how much it sees, from 0
    (the request's probability alone) to 1 (what is right).
    """

    seed: int
    mean: float
    spread: float = 0.0
    drift: float = 0.0
    insight: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.mean <= 1 or self.spread < 0 or not 0 <= self.insight <= 1:
            values = f"mean is {self.mean}, spread {self.spread} and insight {self.insight}"
            raise ValueError(f"{values}; they must be in [0, 1], at least 0, and in [0, 1]")

    def probability(self, request: int, output_index: int) -> float:
        """The probability that the proposal for output token `output_index` is right."""
        uniform = mix(request ^ mix(self.seed + 3)) / 2**64
        exact = self.mean + self.spread * (2 * uniform - 1) + self.drift * output_index / 1000
        return min(1.0, max(0.0, exact))

    def __call__(self, request: int, output_index: int, drafts: int) -> int:
        """See `Acceptance`."""
        for depth in range(drafts):
            position = output_index + 1 + depth
            if self._uniform(4, request, position) >= self.probability(request, position):
                return depth
        return drafts

    def confidence(self, request: int, output_index: int, drafts: int) -> tuple[float, ...]:
        """See `Confidence`: each proposal is seen to be right or not with probability `insight`, else it is guessed at
        the request's rate, and nobody knows which of both it was."""
        return tuple([self._belief(request, output_index + 1 + depth) for depth in range(drafts)])

    def _belief(self, request: int, position: int) -> float:
        probability, insight = self.probability(request, position), self.insight
        stream = 4 if self._uniform(5, request, position) < insight else 6
        seen_right = self._uniform(stream, request, position) < probability
        return probability + insight * ((1.0 if seen_right else 0.0) - probability)

    def _uniform(self, stream: int, request: int, position: int) -> float:
        """A number in [0, 1) for each stream, request and position."""
        return mix(mix(request + self.seed + stream & HASH_MASK) + position * _GOLDEN & HASH_MASK) / 2**64
