"""What requests are worth and what waiting costs, worked out a second time from docs/scheduling.md.

Owns lane values, prices not yet set, normalizers, reference intervals and chains, for the oracle alone. Does not own
which lanes come together. Surprising rule: it counts in whatever `number` it is given; with `Fraction` it is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.selection.view import GraphRow, Phase, RequestRow, View

Number = Any

SERVED_BY = {
    Phase.PREFILL: (GraphKind.PREFILL, GraphKind.MIXED),
    Phase.SCORED_PREFILL: (GraphKind.SCORED_PREFILL,),
    Phase.DECODE: (GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED),
    Phase.TERMINAL: (GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT),
}
PROMPT_PHASES = (Phase.PREFILL, Phase.SCORED_PREFILL)


@dataclass(frozen=True, slots=True)
class Lane:
    """One request's part in a frame: `tokens` positions, worth `service` and `urgency` for each ms of its wait."""

    row: RequestRow
    tokens: int
    service: Number
    urgency: Number
    age_ms: Number

    def value(self, until_ms: Number) -> Number:
        """Worth of a frame that ends `until_ms` after the planning start."""
        return self.service + self.urgency * (self.age_ms + until_ms)


@dataclass(frozen=True, slots=True)
class Chain:
    """What waits at the end of a row's stages: the lane of its inference, and the time after the next stage (F)."""

    lane: Lane
    rest_ms: Number

    def value(self, first_ms: Number) -> Number:
        """V * T/(T + F) for a next stage of T = `first_ms`."""
        worth = self.lane.value(first_ms + self.rest_ms)
        return worth * first_ms / (first_ms + self.rest_ms)


def serving(row: RequestRow) -> tuple[int, int]:
    """Sort key of the serving order."""
    return row.last_fence, row.slot


def consumed(row: RequestRow, capacity: int) -> int:
    """Prompt tokens that a chunk of at most `capacity` takes; 0 if it cannot serve the row."""
    end = min(row.position + capacity, row.boundary)
    while True:
        starts = [start for start, stop in row.spans if start < end < stop]
        if not starts:
            return max(0, end - row.position)
        end = min(starts)


def reach(row: RequestRow) -> int:
    """Prompt tokens that a chunk without bounds would take."""
    return consumed(row, row.prompt_tokens)


def emits(row: RequestRow, tokens: int) -> bool:
    """Whether a chunk of `tokens` ends with an output token."""
    return row.output_left > 0 and row.position + tokens == row.prompt_tokens


def chances(row: RequestRow, shape: GraphShape) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What the proposals of a program's source may come to for a row: plain, and for scores."""
    if shape.source is Source.COPY:
        return row.copy_survival, row.copy_scored_survival
    return row.survival, row.scored_survival


def targets(row: RequestRow, shape: GraphShape) -> int:
    """Target positions of a decoding row in a program that nobody else has a part in."""
    if shape.width == 1:
        return 1
    packed = shape.packed_targets
    return min(shape.width, shape.draft_depth + 1, packed, len(chances(row, shape)[0]) + 1, row.output_left)


def queueable(graph: GraphRow) -> bool:
    """Whether frames of a graph can be in flight with others."""
    return graph.shape.kind in (GraphKind.DECODE, GraphKind.SPECULATIVE) and graph.duration_ns > 0 and not graph.stale


def drains(graph: GraphRow) -> bool:
    """Whether a graph needs an empty window, whomever it serves."""
    return not queueable(graph) or graph.shape.source is Source.COPY


class Values:
    """Every number that one view's decision needs."""

    def __init__(self, view: View, number: Callable[[float], Number]) -> None:
        self.view, self.number = view, number
        policy, scale = view.policy, number(view.value_scale)
        self.scale = scale
        self.output_value = number(policy.output_token_value) * scale
        self.terminal_value = number(policy.terminal_value) * scale
        self.fairness = number(policy.token_fairness)
        self.delivery_fairness = number(policy.delivery_fairness)
        self.decode_price = number(policy.decode_age_price) * scale
        self.terminal_price = number(policy.terminal_age_price) * scale
        self.first_price = number(policy.first_output_age_price) * scale
        self.output_time = number(policy.output_time_price) * scale
        self.prompt_time = number(policy.prompt_time_price) * scale
        self.first_value = number(policy.first_output_value) * scale
        self.first_urgency = number(policy.first_output_urgency) * scale
        self.gap_price = number(policy.gap_price) * scale
        self.streams = [r for r in view.requests if r.phase is Phase.DECODE and r.output_left > 0]
        self.terminals = [r for r in view.requests if r.phase is Phase.TERMINAL]
        self.decoders = [r for r in self.streams if not r.stages]
        self.prompts = [
            r for r in view.requests if r.phase in PROMPT_PHASES and not r.stages and r.position < r.boundary
        ]
        self.unheard = sum(r.phase in PROMPT_PHASES for r in view.requests) + view.queued_requests
        self.all_streams = len(self.streams) + len(self.terminals)
        self.waiting_cost = (
            self.decode_price * len(self.streams)
            + self.terminal_price * len(self.terminals)
            + self.first_price * self.unheard
        )
        self._sigma: dict[int, Number | None] = {}
        self._price: dict[int, Number] = {}
        self._lane: dict[tuple[int, Source, int], Lane] = {}
        self.gap = number(view.host_gap_ms)

    def graphs(self, kinds: Iterable[GraphKind]) -> list[GraphRow]:
        """The prepared graphs of `kinds`, in the catalog's order."""
        wanted = tuple(kinds)
        return [g for g in self.view.graphs if g.shape.kind in wanted]

    def ms(self, graph: GraphRow) -> Number:
        """T; 0 if unknown."""
        return self.number(graph.duration_ns) / 1_000_000

    def spent(self, graph: GraphRow, cohort: Iterable[RequestRow] = ()) -> Number:
        """T as scores have it: with the host gap where the window must be empty."""
        waits = drains(graph) or any(row.needs_feedback for row in cohort)
        return self.ms(graph) + self.gap if waits and graph.duration_ns else self.ms(graph)

    # Reference intervals and normalizers

    def _best_ms(self, kinds: Iterable[GraphKind], family: int) -> Number | None:
        """T of the measured graph with the least T/min(B, k), of equal ones the shorter."""
        found = [(self.ms(g) / min(g.shape.batch, family), self.ms(g)) for g in self.graphs(kinds) if g.duration_ns]
        return min(found)[1] if found else None

    def _family(self, kinds: Iterable[GraphKind], family: int) -> Number | None:
        rates = [self.ms(g) / min(g.shape.batch, family) for g in self.graphs(kinds) if g.duration_ns]
        return self.all_streams * min(rates) if rates else None

    def _sum(self, parts: Iterable[Number]) -> Number:
        return sum(parts, self.number(0))

    def stage_ms(self, kind: GraphKind) -> Number | None:
        """T of one stage at the graph that the reference intervals use."""
        return self._best_ms([kind], sum(kind in r.stages for r in self.view.requests))

    def sigma(self, row: RequestRow) -> Number | None:
        """Reference interval of a stream; None if something that it needs is not measured."""
        if row.slot not in self._sigma:
            self._sigma[row.slot] = self._sigma_of(row)
        return self._sigma[row.slot]

    def _sigma_of(self, row: RequestRow) -> Number | None:
        if row.phase is Phase.TERMINAL:
            return self._family(SERVED_BY[Phase.TERMINAL], len(self.terminals))
        if not row.stages:
            return self._family(SERVED_BY[Phase.DECODE], len(self.decoders))
        way = [self.stage_ms(kind) for kind in row.stages]
        way.append(self._best_ms(SERVED_BY[Phase.DECODE], len(self.streams)))
        return None if None in way else self.all_streams * self._sum(way)

    def rate(self, row: RequestRow) -> Number | None:
        """Normalizer: the greatest expected tokens/T of a row that decodes or consumes its prompt, in its phase."""
        if row.phase is Phase.TERMINAL or (row.phase is Phase.DECODE and not row.output_left):
            return None
        rates = []
        for graph in self.graphs(SERVED_BY[row.phase]):
            if not graph.duration_ns:
                continue
            if row.phase is Phase.DECODE:
                tokens = self.expected(row, graph.shape)
            else:
                chunk = consumed(row, graph.shape.prefill_tokens)
                tokens = self.number(chunk + emits(row, chunk)) if chunk else self.number(0)
            rates.append(tokens / self.ms(graph))
        return max(rates) if rates and max(rates) > 0 else None

    def expected(self, row: RequestRow, shape: GraphShape) -> Number:
        """Tokens that a program gives a row of its own, without the policy's exponent."""
        plain, count = chances(row, shape)[0], targets(row, shape)
        return sum((self.number(s) for s in plain[: count - 1]), self.number(1))

    def prompt_rate(self, phase: Phase) -> Number | None:
        """The best measured prompt rate of a phase, in tokens/ms."""
        rates = [g.shape.prefill_tokens / self.ms(g) for g in self.graphs(SERVED_BY[phase]) if g.duration_ns]
        return max(rates) if rates else None

    def token_ms(self, phase: Phase) -> Number:
        """Least time per prompt token of the measured graphs of a phase; 0 with none."""
        rate = self.prompt_rates[phase]
        return 1 / rate if rate else self.number(0)

    def round_ms(self, row: RequestRow) -> Number:
        """Least time per row of the rounds that a stream's family shares, or all streams for a blocked one; 0 if no
        round is measured."""
        family = len(self.streams) if row.stages else len(self.decoders)
        graphs = self.graphs(SERVED_BY[Phase.DECODE])
        return min((self.ms(g) / min(g.shape.batch, family) for g in graphs if g.duration_ns), default=self.number(0))

    def gap_cost(self, horizon_ms: Number) -> Number:
        """What the gaps of a frame or sequence of `horizon_ms` cost per ms: for each stream the integral of the price
        times (gap/tolerated)^8 from its age on, over the horizon and the streams."""
        sigma = self.sigma(self.decoders[0]) if self.decoders else None
        if sigma is None:
            return self.number(0)
        tolerated = self.number(self.view.policy.gap_stretch) * sigma
        total = self.number(0)
        for row in self.streams:
            age = min(self.number(row.age_ms), tolerated * 3 / 2)
            total += (((age + horizon_ms) / tolerated) ** 9 - (age / tolerated) ** 9) * tolerated / 9
        return self.gap_price * total / (self.all_streams * horizon_ms)

    def price(self, row: RequestRow) -> Number:
        """Scaled token price; an unset one is the newcomer's."""
        if row.slot not in self._price:
            if row.token_price is not None:
                self._price[row.slot] = self.number(row.token_price)
            else:
                runnable = sum(r.phase is not Phase.TERMINAL for r in self.view.requests)
                newcomer = self.number(self.view.policy.newcomer_share) * runnable * self.scale
                rate = self.rate(row)
                self._price[row.slot] = newcomer / rate if rate else self.number(0)
        return self._price[row.slot]

    # Lanes

    def prompt_lane(self, row: RequestRow, tokens: int) -> Lane:
        """A chunk of `tokens`."""
        price = self.fairness * self.price(row)
        service = tokens * (self.scale + price) + emits(row, tokens) * (self.output_value + price)
        rate = self.prompt_rates[row.phase]
        left = row.prompt_tokens - row.position
        service += tokens * self.token_ms(row.phase) * (self.prompt_time + self.first_urgency * self.hurry(row))
        service += self.number(tokens) / left * self.first_value * self.growth(row)
        urgency = self.number(0)
        if rate is not None:
            sigma = self.unheard * left / rate
            urgency = tokens * self.first_price * sigma / left
        return Lane(row, tokens, service, urgency, self.number(row.age_ms))

    def hurry(self, row: RequestRow) -> Number:
        """How urgent a first output is: (2x/(1 + x^2))^4 of the age in patiences."""
        x = self.number(row.age_ms) / self.number(self.view.policy.first_output_patience_ms)
        return (2 * x / (1 + x * x)) ** 4

    def growth(self, row: RequestRow) -> Number:
        """By how much the value of a first output has grown."""
        growth_ms = self.number(self.view.policy.first_output_growth_ms)
        return 1 + self.number(row.age_ms) / growth_ms if growth_ms else self.number(1)

    @cached_property
    def prompt_rates(self) -> dict[Phase, Number | None]:
        """The best measured rate of each prompt phase."""
        return {phase: self.prompt_rate(phase) for phase in PROMPT_PHASES}

    def decode_lane(self, row: RequestRow, shape: GraphShape, count: int | None = None) -> Lane:
        """A round of a decoding row with all the target positions that it can use, or `count` of them; of one ready, or
        once its stages are done."""
        count = targets(row, shape) if count is None else count
        key = row.slot, shape.source, count
        if key not in self._lane:
            tokens = sum((self.number(s) for s in chances(row, shape)[1][: count - 1]), self.number(1))
            service = tokens * (self.output_value + self.fairness * self.price(row))
            if row.delivery_price is not None:
                service += self.delivery_fairness * self.number(row.delivery_price)
            service += self.output_time * self.round_ms(row)
            sigma = self.sigma(row)
            urgency = self.number(0) if sigma is None else self.decode_price * sigma
            self._lane[key] = Lane(row, count, service, urgency, self.number(row.age_ms))
        return self._lane[key]

    def terminal_lane(self, row: RequestRow) -> Lane:
        """The retirement of a terminal row."""
        sigma = self.sigma(row)
        urgency = self.number(0) if sigma is None else self.terminal_price * sigma
        return Lane(row, 0, self.terminal_value, urgency, self.number(row.age_ms))

    def lane(self, row: RequestRow, graph: GraphRow) -> Lane | None:
        """The row by itself in a graph of tokens; None if the graph cannot serve it. Stages are not looked at."""
        if graph.shape.kind not in SERVED_BY[row.phase]:
            return None
        if row.phase is Phase.DECODE:
            return self.decode_lane(row, graph.shape) if row.output_left > 0 else None
        tokens = consumed(row, graph.shape.prefill_tokens)
        return self.prompt_lane(row, tokens) if tokens else None

    def chain(self, row: RequestRow) -> Chain | None:
        """The continuation of a row of several stages; None if no graph can serve it."""
        lanes = [(graph, self.lane(row, graph)) for graph in self.graphs(SERVED_BY[row.phase])]
        served = [(graph, lane) for graph, lane in lanes if lane is not None]
        measured = [(graph, lane) for graph, lane in served if graph.duration_ns]
        if not served:
            return None
        if measured:
            graph, lane = max(measured, key=lambda pair: pair[1].service / self.ms(pair[0]))
        else:
            graph, lane = max(served, key=lambda pair: pair[1].service)
        way = [self.stage_ms(kind) for kind in row.stages[1:]] + [self.ms(graph) or None]
        rest = self.number(0) if None in way else self._sum(way)
        if row.phase is not Phase.DECODE:
            lane = Lane(row, lane.tokens, lane.service, self.number(0), lane.age_ms)
        return Chain(lane, rest)

    def per_token(self, row: RequestRow) -> Number:
        """Value per token of all that a prompt row can reach, its age as of now."""
        return self.prompt_lane(row, reach(row)).value(self.number(0)) / reach(row)

    def packing(self, rows: Sequence[RequestRow]) -> list[RequestRow]:
        """Prompt rows in packing order: by value per token, equals in serving order."""
        return sorted((row for row in rows if reach(row)), key=lambda row: (-self.per_token(row), *serving(row)))
