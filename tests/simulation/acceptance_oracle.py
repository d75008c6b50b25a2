"""What is known of proposals, worked out a second time (docs/scheduling.md, "Acceptance" and "Confidence").

Owns means by depth as weighted sums: each observation has weight one and halves with every 128 tokens of its request.
Surprising rule: the cap on a weight is applied when something is observed, so sums are scaled then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Depth:
    """One depth of one request: the weighted sum of what was observed, the weight, and the tokens then."""

    total: float
    weight: float
    tokens: int = 0

    def see(self, value: float, tokens: int) -> None:
        """An observation after `tokens` output tokens."""
        kept = 0.5 ** ((tokens - self.tokens) / 128)
        self.total, self.weight, self.tokens = self.total * kept + value, self.weight * kept + 1.0, tokens
        scale = min(1.0, 128.0 / self.weight)
        self.total, self.weight = self.total * scale, self.weight * scale


@dataclass(slots=True)
class Estimates:
    """All depths of one request, from the means that its source had at its admission."""

    depths: list[Depth] = field(default_factory=list)

    @staticmethod
    def start(means: list[float]) -> Estimates:
        """Two observations' worth of the prior."""
        return Estimates([Depth(2.0 * mean, 2.0) for mean in means])

    def survival(self) -> list[float]:
        """Never rising with depth."""
        means = [depth.total / depth.weight for depth in self.depths]
        return [min(means[: index + 1]) for index in range(len(means))]

    def weights(self, tokens: int) -> list[float]:
        """As old as they are after so many output tokens."""
        return [depth.weight * 0.5 ** ((tokens - depth.tokens) / 128) for depth in self.depths]

    def optimistic(self, tokens: int) -> list[float]:
        """The greatest probabilities that what was seen leaves likely, never rising with depth."""
        means = [depth.total / depth.weight for depth in self.depths]
        bounds = [
            mean + math.sqrt(math.log(20) / (2 * weight))
            for mean, weight in zip(means, self.weights(tokens), strict=True)
        ]
        return [min(1.0, *bounds[: index + 1]) for index in range(len(bounds))]

    def see(self, values: Sequence[float], tokens: int, prior: list[float]) -> None:
        """A round says this of each depth, and of all requests a sixty-fourth of it."""
        for index, value in enumerate(values):
            self.depths[index].see(value, tokens)
            prior[index] += (value - prior[index]) / 64


def observed(targets: int, served: int, ended: bool, known: Sequence[float] | None) -> list[float]:
    """What a round says of each depth: a token beyond the first says that its proposal was accepted; the first that
    was not, unless the output ended there, speaks for all that were offered beyond it. Where the program knows the
    probabilities of these prefixes, they say it better."""
    seen = [1.0] * (served - 1) + [0.0] * (0 if ended else targets - served)
    for index, probability in enumerate(known or ()):
        if index < len(seen):
            seen[index] = probability
    return seen
