"""An oracle for the selector, written from the rules of docs/scheduling.md: it lists every legal candidate.

Owns an enumeration that shares no code with the selector. Slow and plain on purpose. Surprising rule: it counts in
whatever `number` it is given; with `Fraction` its ties are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from flare.machines.graph import GraphKind
from flare.machines.selection.view import GraphRow, Phase, RequestRow, View

Number = Any


@dataclass(frozen=True)
class Choice:
    """A legal candidate. `key` is its place in the total order; the smallest wins."""

    graph: GraphRow
    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    score: Number
    known: bool
    key: tuple[Any, ...]


class Oracle:
    """All candidates of one view."""

    def __init__(self, view: View, number: Callable[[float], Number]) -> None:
        self.view = view
        self.number = number
        self.decoders = [r for r in view.requests if r.phase is Phase.DECODE and r.output_left > 0]
        policy = view.policy
        scale = number(view.value_scale)
        self.prompt_base = scale
        self.output_base = number(policy.output_token_value) * scale
        self.age_price = number(policy.decode_age_price) * scale
        self.fairness = number(policy.token_fairness)
        self.delivery_fairness = number(policy.delivery_fairness)
        self.newcomer = number(policy.newcomer_share) * len(view.requests) * scale

    def graphs(self, kind: GraphKind) -> list[GraphRow]:
        return [g for g in self.view.graphs if g.shape.kind is kind]

    def ms(self, graph: GraphRow) -> Number:
        return self.number(graph.duration_ns) / 1_000_000

    def sigma(self) -> Number | None:
        """K times the least T/min(B, k), over measured decode graphs; all decoders are one family."""
        k = len(self.decoders)
        if not k:
            return None
        found = [self.ms(g) / min(g.shape.batch, k) for g in self.graphs(GraphKind.DECODE) if g.duration_ns]
        return k * min(found) if found else None

    def kind_of(self, request: RequestRow) -> GraphKind:
        return GraphKind(request.phase.value)

    def work(self, request: RequestRow, graph: GraphRow) -> tuple[int, int]:
        """(prompt tokens, output tokens) that the graph would do for the request."""
        if request.phase is Phase.DECODE:
            return 0, 1
        prompt = min(graph.shape.prefill_tokens, request.boundary - request.position)
        finishes = request.position + prompt == request.prompt_tokens and request.output_left > 0
        return prompt, int(finishes)

    def positions(self, request: RequestRow, graph: GraphRow) -> int:
        """Token positions that the graph computes for the request: its prompt tokens, or its pending token."""
        return self.work(request, graph)[0] or 1

    def token_price(self, request: RequestRow) -> Number:
        if request.token_price is not None:
            return self.number(request.token_price)
        rates = [
            self.number(sum(self.work(request, g))) / self.ms(g)
            for g in self.graphs(self.kind_of(request))
            if g.duration_ns
        ]
        return self.newcomer / max(rates) if rates else self.number(0)

    def service(self, request: RequestRow, graph: GraphRow) -> Number:
        prompt, output = self.work(request, graph)
        price = self.fairness * self.token_price(request)
        value = prompt * (self.prompt_base + price) + output * (self.output_base + price)
        if request.phase is Phase.DECODE and request.delivery_price is not None:
            value += self.delivery_fairness * self.number(request.delivery_price)
        return value

    def score(self, graph: GraphRow, cohort: Iterable[RequestRow]) -> Number:
        cohort = list(cohort)
        value = sum((self.service(r, graph) for r in cohort), self.number(0))
        if not graph.duration_ns:
            return value
        duration, sigma = self.ms(graph), self.sigma()
        for request in cohort:
            if request.phase is Phase.DECODE and sigma is not None:
                value += self.age_price * sigma * (self.number(request.age_ms) + duration)
        return value / duration - duration / 2 * self.age_price * len(self.decoders)

    def legal(self) -> Iterable[tuple[GraphRow, tuple[RequestRow, ...]]]:
        """Every graph with every cohort that it could serve, but for the exploration rule."""
        for graph in self.graphs(GraphKind.DECODE):
            for size in range(1, min(graph.shape.batch, len(self.decoders)) + 1):
                for cohort in combinations(self.decoders, size):
                    yield graph, cohort
        for request in self.view.requests:
            if request.phase is Phase.DECODE or request.position >= request.boundary:
                continue
            graphs = self.graphs(self.kind_of(request))
            for graph in graphs:
                if not (graph.duration_ns == 0 and self.unexplored(request, graph, graphs)):
                    yield graph, (request,)

    @staticmethod
    def unexplored(request: RequestRow, graph: GraphRow, graphs: list[GraphRow]) -> bool:
        """A smaller prepared capacity consumes the same tokens up to the next endpoint."""
        stop = min(request.next_endpoint, request.boundary) - request.position
        same = min(graph.shape.prefill_tokens, stop)
        return any(
            g.shape.prefill_tokens < graph.shape.prefill_tokens and min(g.shape.prefill_tokens, stop) == same
            for g in graphs
        )

    def choices(self) -> list[Choice]:
        """All candidates that compete, best first."""
        found = [self.choice(graph, cohort) for graph, cohort in self.legal()]
        smallest: dict[tuple[Any, ...], int] = {}
        for one in found:
            work = (one.graph.shape.kind, one.slots, one.tokens)
            extent = one.graph.shape.batch + one.graph.shape.prefill_tokens
            smallest[work] = min(extent, smallest.get(work, extent))
        kept = [
            one
            for one in found
            if one.graph.shape.batch + one.graph.shape.prefill_tokens
            == smallest[(one.graph.shape.kind, one.slots, one.tokens)]
        ]
        return sorted(kept, key=lambda one: one.key)

    def choice(self, graph: GraphRow, cohort: tuple[RequestRow, ...]) -> Choice:
        slots = tuple(sorted(r.slot for r in cohort))
        work = {r.slot: self.positions(r, graph) for r in cohort}
        score, shape = self.score(graph, cohort), graph.shape
        positions = shape.batch if shape.kind is GraphKind.DECODE else shape.prefill_tokens
        key = (
            graph.duration_ns > 0,
            -score,
            graph.duration_ns,
            -len(cohort),
            tuple(sorted(r.last_fence for r in cohort)),
            positions - sum(work.values()),
            slots,
            (shape.kind.value, shape.batch, shape.prefill_tokens),
        )
        return Choice(graph, slots, tuple(work[s] for s in slots), score, graph.duration_ns > 0, key)
