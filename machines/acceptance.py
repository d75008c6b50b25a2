"""How many proposals of a speculative round are likely to be accepted.

Owns the estimates of prefix survival, per request and depth, and the prior that new requests start from
(docs/scheduling.md, "Graphs"). Does not own which widths compete. Surprising rule: each depth is learned
apart, so means may rise with depth; whoever reads them takes the running minimum.
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
    """What is known of a source of proposals, whoever asks: a mean for each depth d = 1..D, at first 0.5**d."""

    __slots__ = ("means",)

    def __init__(self, depth: int) -> None:
        self.means = [0.5 ** (d + 1) for d in range(depth)]

    def observe(self, observations: Iterable[float]) -> None:
        """Move the mean of each depth, from the first on, towards what was observed there (0 to 1)."""
        for depth, observed in enumerate(observations):
            self.means[depth] += (observed - self.means[depth]) * PRIOR_STEP


class Acceptance:
    """One request's estimates for one source of proposals. `tokens` are output tokens that it has produced so far."""

    __slots__ = ("_means", "_seen_at", "_weights", "exponent", "scored_survival", "survival")

    def __init__(self, prior: Prior, exponent: float) -> None:
        self.exponent = exponent
        self._means = list(prior.means)
        self._weights = [START_WEIGHT] * len(prior.means)
        self._seen_at = [0] * len(prior.means)
        self._survive()

    survival: tuple[float, ...]
    """The estimates, never rising with depth."""

    scored_survival: tuple[float, ...]
    """The same raised to the policy's exponent."""

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

    def optimistic(self, tokens: int) -> tuple[float, ...]:
        """The most that each depth may come to with 95% confidence, never rising with depth."""
        means = enumerate(self._means)
        bounds = [min(1.0, mean + math.sqrt(_OPTIMISM / self.weight(depth, tokens))) for depth, mean in means]
        return tuple(accumulate(bounds, min))

    def _survive(self) -> None:
        self.survival = tuple(accumulate(self._means, min))
        plain = self.exponent == 1.0
        self.scored_survival = self.survival if plain else tuple([mean**self.exponent for mean in self.survival])


def observations(width: int, committed: int, *, ended: bool) -> tuple[float, ...]:
    """What a round of `width` targets that committed so many tokens says of each depth.

    An accepted prefix was observed as 1, and a rejection as 0 of every longer one that was offered; where the output
    ended, what lies beyond is not known.
    """
    accepted = max(0, committed - 1)
    return (1.0,) * accepted + (() if ended else (0.0,) * (width - 1 - accepted))
