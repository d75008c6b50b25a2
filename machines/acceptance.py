"""How many proposals of a speculative round are likely to be accepted.

Owns estimates by depth that age with a request's output, the prior that new ones start from, and the bounds on them
(docs/scheduling.md, "Acceptance"). Does not own which sources there are (`beliefs`) or which widths compete.
Surprising rule: each depth is learned apart, so means may rise with depth; `survival` is the running minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

START_WEIGHT = 2.0
WEIGHT_MAX = 128.0
HALF_LIFE_TOKENS = 128.0
PRIOR_STEP = 1.0 / 64.0
_OPTIMISM = math.log(20.0) / 2.0


class Prior:
    """What is known of all requests together: a mean for each depth d = 1..D, at first 0.5**d."""

    __slots__ = ("means",)

    def __init__(self, depth: int) -> None:
        self.means = [0.5 ** (d + 1) for d in range(depth)]

    def observe(self, observations: Iterable[float]) -> None:
        """Move the mean of each depth, from the first on, towards what was observed there (0 to 1)."""
        for depth, observed in enumerate(observations):
            self.means[depth] += (observed - self.means[depth]) * PRIOR_STEP


class Estimates:
    """One request's estimates of probabilities by depth. `tokens` are output tokens that it has produced so far."""

    __slots__ = ("_means", "_seen_at", "_weights", "survival")

    def __init__(self, prior: Prior) -> None:
        self._means = list(prior.means)
        self._weights = [START_WEIGHT] * len(prior.means)
        self._seen_at = [0] * len(prior.means)
        self._survive()

    survival: tuple[float, ...]
    """The estimates, never rising with depth."""

    def observe(self, observations: Sequence[float], tokens: int) -> None:
        """Take what a completed round says of each depth, from the first on, after its tokens were counted."""
        for depth, observed in enumerate(observations):
            weight = self.weight(depth, tokens)
            self._means[depth] = (weight * self._means[depth] + observed) / (weight + 1.0)
            self._weights[depth] = min(weight + 1.0, WEIGHT_MAX)
            self._seen_at[depth] = tokens
        self._survive()

    def mean(self, depth: int) -> float:
        """The estimate of depth `depth` (0 is the first) alone."""
        return self._means[depth]

    def weight(self, depth: int, tokens: int) -> float:
        """The weight of that estimate, aged with the tokens produced since it was observed."""
        return float(self._weights[depth] * 2.0 ** (-(tokens - self._seen_at[depth]) / HALF_LIFE_TOKENS))

    def weights(self, tokens: int) -> tuple[float, ...]:
        """The aged weight of each depth."""
        return tuple([self.weight(depth, tokens) for depth in range(len(self._weights))])

    def optimistic(self, weights: Sequence[float]) -> tuple[float, ...]:
        """The most that each depth may come to with 95% confidence, by its aged weight, never rising with depth."""
        pairs = zip(self._means, weights, strict=True)
        bounds = [min(1.0, mean + math.sqrt(_OPTIMISM / weight)) for mean, weight in pairs]
        return tuple(accumulate(bounds, min))

    def _survive(self) -> None:
        self.survival = tuple(accumulate(self._means, min))


class Acceptance(Estimates):
    """One request's estimates for one source of proposals, and their scores: raised to the policy's exponent."""

    __slots__ = ("exponent", "scored_survival")

    def __init__(self, prior: Prior, exponent: float) -> None:
        self.exponent = exponent
        super().__init__(prior)

    scored_survival: tuple[float, ...]
    """`survival` as selection scores it."""

    def scored(self, survival: tuple[float, ...]) -> tuple[float, ...]:
        """Probabilities as selection scores them."""
        return survival if self.exponent == 1.0 else tuple([one**self.exponent for one in survival])

    def _survive(self) -> None:
        super()._survive()
        self.scored_survival = self.scored(self.survival)


def observations(
    width: int, committed: int, *, ended: bool, survival: tuple[float, ...] | None = None
) -> tuple[float, ...]:
    """What a round of `width` targets that committed so many tokens says of each depth.

    An accepted prefix was observed as 1, and a rejection as 0 of every longer one that was offered; where the output
    ended, what lies beyond is not known. `survival` has the probabilities themselves, as far as the program knows them.
    """
    accepted = max(0, committed - 1)
    seen = (1.0,) * accepted + (() if ended else (0.0,) * (width - 1 - accepted))
    return seen if survival is None else survival[: len(seen)] + seen[len(survival) :]
