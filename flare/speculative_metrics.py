"""Counters of speculative rounds: complete programs, what they offered and what was accepted.

Owns the counts and their names (docs/observability.md, "Metrics"). Does not own when a frame counts (`metrics`).
Surprising rule: a lane that offered nothing is no round; tokens beyond the accepted proposals count nowhere here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from flare.machines.graph import Source

_NAMES = (
    ("rounds", "num_drafts", "Rounds of one request that offered proposals."),
    ("proposed_tokens", "num_draft_tokens", "Proposals verified."),
    ("accepted_tokens", "num_accepted_tokens", "Proposals accepted."),
)
"""Our name, vLLM's, and the meaning."""


class SpeculativeCounts:
    """What rounds came to so far, by source of proposals."""

    def __init__(self) -> None:
        self._programs = dict.fromkeys(Source, 0)
        self._counts = {source: [0, 0, 0] for source in Source}
        self._by_depth: dict[tuple[Source, int], int] = {}

    def program(self, source: Source, rounds: Iterable[tuple[int, int]]) -> None:
        """A complete program ran: of each lane that offered proposals, its target positions and output tokens."""
        self._programs[source] += 1
        counts = self._counts[source]
        for targets, output in rounds:
            accepted = output - 1
            counts[0] += 1
            counts[1] += targets - 1
            counts[2] += accepted
            for depth in range(1, accepted + 1):
                self._by_depth[source, depth] = self._by_depth.get((source, depth), 0) + 1

    def serving(self, prefix: str, model: Sequence[str]) -> Iterator[Metric]:
        """The sums of all sources, under the names that vLLM has for them."""
        for place, (_, name, text) in enumerate(_NAMES):
            family = CounterMetricFamily(f"{prefix}spec_decode_{name}", text, labels=["model_name"])
            family.add_metric(model, sum(counts[place] for counts in self._counts.values()))
            yield family

    def scheduling(self) -> Iterator[Metric]:
        """The counters by source."""
        programs = CounterMetricFamily(
            "flare_speculative_programs", "Complete programs that offered proposals.", labels=["source"]
        )
        for source, count in self._programs.items():
            programs.add_metric([source.value], count)
        yield programs
        for place, (name, _, text) in enumerate(_NAMES):
            family = CounterMetricFamily(f"flare_speculative_{name}", text, labels=["source"])
            for source, counts in self._counts.items():
                family.add_metric([source.value], counts[place])
            yield family
        depths = CounterMetricFamily(
            "flare_speculative_accepted_tokens_per_depth", "Proposals accepted at a depth.", labels=["source", "depth"]
        )
        for (source, depth), count in sorted(self._by_depth.items()):
            depths.add_metric([source.value, str(depth)], count)
        yield depths
