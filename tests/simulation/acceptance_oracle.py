"""What is known of accepted proposals, worked out a second time (docs/scheduling.md, "Graphs").

Owns means by depth as weighted sums: each observation has weight one and halves with every 128 tokens of its request.
Surprising rule: the cap on a weight is applied when something is observed, so sums are scaled then.
"""

from __future__ import annotations

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


def observed(targets: int, served: int, ended: bool) -> list[float]:
    """What a round says of each depth: a token beyond the first says that its proposal was accepted; the first that
    was not, unless the output ended there, speaks for all that were offered beyond it."""
    return [1.0] * (served - 1) + [0.0] * (0 if ended else targets - served)
