"""What is expected of proposals, of one request and of all of them.

Owns which estimates there are: acceptance for each source, and forecasts of what a program that drafts will say of its
own confidence (docs/scheduling.md, "Acceptance" and "Confidence"). Does not own how an estimate moves (`acceptance`).
Surprising rule: forecasts and acceptance never mix; the first predict which rows a program allocates, the second what
those rows bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .acceptance import Acceptance, Estimates, Prior
from .graph import GraphShape, Source


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Of one request. Only the sources that its catalog has are in it; `forecast` is None where nothing is drafted."""

    acceptance: dict[Source, Acceptance]
    forecast: Estimates | None


class Population:
    """Of all requests: what each new one starts from. `exponent` is the policy's, for scores."""

    def __init__(self, catalog: Iterable[GraphShape], exponent: float) -> None:
        depths: dict[Source, int] = {}
        for shape in catalog:
            if shape.draft_depth:
                depths[shape.source] = max(shape.draft_depth, depths.get(shape.source, 0))
        self._exponent = exponent
        self._priors = {source: Prior(depth) for source, depth in depths.items()}
        self._confidence = Prior(depths[Source.DRAFT]) if Source.DRAFT in depths else None

    def __bool__(self) -> bool:
        """Whether anything is proposed at all."""
        return bool(self._priors)

    def fresh(self) -> Beliefs:
        """Of a new request."""
        acceptance = {source: Acceptance(prior, self._exponent) for source, prior in self._priors.items()}
        return Beliefs(acceptance, None if self._confidence is None else Estimates(self._confidence))

    def accept(self, beliefs: Beliefs, source: Source, seen: Sequence[float], tokens: int) -> None:
        """A completed round says so much of each depth of `source`, after `tokens` output tokens of the request."""
        beliefs.acceptance[source].observe(seen, tokens)
        self._priors[source].observe(seen)

    def forecast(self, beliefs: Beliefs, joint: Sequence[float], tokens: int) -> None:
        """A completed round drafted prefixes of these joint probabilities."""
        assert beliefs.forecast is not None and self._confidence is not None
        beliefs.forecast.observe(joint, tokens)
        self._confidence.observe(joint)
