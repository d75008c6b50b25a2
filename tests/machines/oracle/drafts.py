"""Every legal cohort of every prepared graph, alone and in pairs.

Owns the enumeration for the oracle. Does not own values or the order. Surprising rule: it takes all subsets, the
worthless ones too; only rows that advance for free are spelled out afterwards, since they change no score.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from flare.machines.graph import SNAPSHOT_KINDS, STAGE_KINDS, GraphKind
from flare.machines.selection.view import GraphRow, Phase, RequestRow

from .shares import cohorts
from .values import SERVED_BY, Chain, Lane, Number, Values, consumed, reach

Subsets = list[tuple[Number, Number, tuple[Lane, ...]]]

PREREQUISITES = STAGE_KINDS - {GraphKind.TERMINAL_SNAPSHOT}


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate as enumerated.

    `prompts` and `decoders` are the lanes of its graph of tokens, `graph` itself or else `following`; those that a
    prerequisite enables have stages. `operations` are the lanes of value in a graph of stages: terminal rows and
    chains. `gain` and `cost` are the two sides of the score, for judging how exact a difference of them can be. `whole`
    is the time that it is divided by.
    """

    graph: GraphRow
    following: GraphRow | None
    prompts: tuple[Lane, ...]
    decoders: tuple[Lane, ...]
    operations: tuple[Lane, ...]
    known: bool
    score: Number
    gain: Number
    cost: Number
    whole: Number

    @property
    def enabled(self) -> tuple[Lane, ...]:
        """Lanes of the following graph that the first one makes ready."""
        return tuple(lane for lane in self.prompts + self.decoders if lane.row.stages)


def packed(rows: Sequence[RequestRow], capacity: int) -> list[int] | None:
    """Tokens of each row where the rows share `capacity` in this order; None if it cannot serve all of them."""
    tokens = []
    for row in rows:
        tokens.append(consumed(row, capacity) if capacity > 0 else 0)
        capacity -= reach(row)
    return tokens if all(tokens) else None


def prompt_rows(graph: GraphRow) -> int:
    """How many prompts the graph takes."""
    shape = graph.shape
    if shape.kind is GraphKind.MIXED:
        return shape.prompt_rows
    return shape.batch if shape.kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL) else 0


def decode_rows(graph: GraphRow, prompts: int) -> int:
    """How many decoding rows the graph takes beside `prompts` prompts."""
    kind = graph.shape.kind
    if kind is GraphKind.MIXED:
        return graph.shape.batch - prompts
    return graph.shape.batch if kind in SERVED_BY[Phase.DECODE] else 0


def _subsets(lanes: Sequence[Lane], most: int, until_ms: Number, zero: Number, saved: Number = 0) -> Subsets:
    """All subsets of up to `most` lanes: value at `until_ms` with `saved` for each lane, priced service, lanes."""
    found = []
    for size in range(min(most, len(lanes)) + 1):
        for chosen in combinations(lanes, size):
            value = sum((lane.value(until_ms) + saved for lane in chosen), zero)
            found.append((value, sum((lane.service for lane in chosen), zero), chosen))
    return found


class Drafts:
    """The enumeration for one view."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.zero = values.number(0)
        self.requests = values.view.requests
        self.tokens = [g for g in values.view.graphs if g.shape.kind not in STAGE_KINDS]
        self.stages = [g for g in values.view.graphs if g.shape.kind in STAGE_KINDS]
        self.orders = {phase: values.packing([r for r in values.prompts if r.phase is phase]) for phase in Phase}
        self.chains: dict[int, Chain] = {}
        for row in self.requests:
            chain = values.chain(row) if len(row.stages) > 1 else None
            if chain is not None:
                self.chains[row.slot] = chain

    def all(self) -> Iterator[Draft]:
        """Every candidate, those that exploration or dominance leave out as well."""
        for graph in self.tokens:
            yield from self._single(graph)
        for graph in self.stages:
            yield from self._operations(graph)
            if graph.shape.kind in PREREQUISITES:
                for following in self.tokens:
                    if not following.shape.ragged:
                        yield from self._pairs(graph, following)

    def _draft(
        self,
        graph: GraphRow,
        value: Number,
        service: Number,
        prompts: tuple[Lane, ...] = (),
        decoders: tuple[Lane, ...] = (),
        operations: tuple[Lane, ...] = (),
        following: GraphRow | None = None,
    ) -> Draft:
        values = self.values
        known = graph.duration_ns > 0 and (following is None or following.duration_ns > 0)
        if not known:
            return Draft(graph, following, prompts, decoders, operations, False, service, service, self.zero, self.zero)
        whole = values.spent(graph) + (values.spent(following) if following else self.zero)
        gain, cost = value / whole, whole * values.waiting_cost / 2 + values.gap_cost(whole)
        return Draft(graph, following, prompts, decoders, operations, True, gain - cost, gain, cost, whole)

    def delayed(self, draft: Draft) -> Draft:
        """A round with the host gap that it has for one of its rows alone."""
        whole = self.values.spent(draft.graph, [lane.row for lane in draft.decoders])
        if not draft.known or whole == draft.whole:
            return draft
        gain = sum((lane.value(whole) for lane in draft.decoders), self.zero) / whole
        cost = whole * self.values.waiting_cost / 2 + self.values.gap_cost(whole)
        return replace(draft, score=gain - cost, gain=gain, cost=cost, whole=whole)

    def _prompt_cohorts(self, graph: GraphRow) -> Iterator[tuple[Lane, ...]]:
        """Each ready prompt row alone, and the first two and more of the packing order."""
        for phase, order in self.orders.items():
            if not order or graph.shape.kind not in SERVED_BY[phase]:
                continue
            cohorts: list[Sequence[RequestRow]] = [[row] for row in order]
            cohorts += [order[:count] for count in range(2, min(prompt_rows(graph), len(order)) + 1)]
            for rows in cohorts:
                tokens = packed(rows, graph.shape.prefill_tokens)
                if tokens is not None:
                    yield tuple(self.values.prompt_lane(r, n) for r, n in zip(rows, tokens, strict=True))

    def _single(self, graph: GraphRow) -> Iterator[Draft]:
        whole, shape = self.values.spent(graph), graph.shape
        if shape.ragged:
            for chosen in cohorts(self.values, graph):
                value, service = sum((lane.value(whole) for lane in chosen), self.zero), self.zero
                yield self._draft(graph, value, sum((lane.service for lane in chosen), service), (), chosen)
            return
        prompts = list(self._prompt_cohorts(graph)) if shape.prefill_tokens else []
        for cohort in ((), *prompts):
            fixed, fixed_service = (
                sum((lane.value(whole) for lane in cohort), self.zero),
                sum((lane.service for lane in cohort), self.zero),
            )
            most = decode_rows(graph, len(cohort))
            lanes = [self.values.decode_lane(row, shape) for row in self.values.decoders] if most else []
            for value, service, chosen in _subsets(lanes, most, whole, self.zero):
                if cohort or chosen:
                    yield self._draft(graph, fixed + value, fixed_service + service, cohort, chosen)

    def chain_lane(self, row: RequestRow, first_ms: Number) -> Lane:
        """A chain's lane in the graph of its next stage: all of V*T/(T + F) as service, V's own if T is unknown."""
        chain = self.chains[row.slot]
        worth = chain.value(first_ms) if first_ms else chain.lane.service
        return Lane(row, 0, worth, self.zero, self.zero)

    def next_stage(self, kind: GraphKind) -> list[RequestRow]:
        """Rows of longer chains whose next stage is of `kind`."""
        return [r for r in self.requests if r.slot in self.chains and r.stages[0] is kind]

    def last_stage(self, kind: GraphKind) -> list[RequestRow]:
        """Rows whose only stage is of `kind`."""
        return [r for r in self.requests if r.stages == (kind,)]

    def _operations(self, graph: GraphRow) -> Iterator[Draft]:
        kind, whole = graph.shape.kind, self.values.spent(graph)
        lanes = [self.chain_lane(row, whole) for row in self.next_stage(kind)]
        if kind in SNAPSHOT_KINDS:
            lanes += [self.values.terminal_lane(row) for row in self.values.terminals]
        for value, service, chosen in _subsets(lanes, graph.shape.batch, whole, self.zero):
            if chosen:
                yield self._draft(graph, value, service, operations=chosen)

    def _following_prompts(self, rows: Iterable[RequestRow], graph: GraphRow) -> Iterator[tuple[Lane, ...]]:
        """No prompt, a ready one (both in mixed graphs and in decode rounds alone), or an enabled one."""
        kind = graph.shape.kind
        if kind in SERVED_BY[Phase.DECODE]:
            yield ()
        if not graph.shape.prefill_tokens:
            return
        ready = [r for r in self.values.prompts if kind is GraphKind.MIXED]
        for row in (*ready, *rows):
            lane = self.values.lane(row, graph) if row.phase is not Phase.DECODE else None
            if lane is not None:
                yield (lane,)

    def _pairs(self, graph: GraphRow, following: GraphRow) -> Iterator[Draft]:
        values, zero, shape = self.values, self.zero, following.shape
        first, whole = values.spent(graph), values.spent(graph) + values.spent(following)
        enabled = [r for r in self.last_stage(graph.shape.kind) if r.phase is not Phase.TERMINAL]
        decodes = following.shape.kind in SERVED_BY[Phase.DECODE]
        newly = [values.decode_lane(r, shape) for r in enabled if decodes and r.phase is Phase.DECODE and r.output_left]
        ready = [values.decode_lane(r, shape) for r in values.decoders] if decodes else []
        terminal = [values.terminal_lane(r) for r in values.terminals]
        if graph.shape.kind not in SNAPSHOT_KINDS:
            terminal = []
        saved = values.terminal_price * (whole * whole - first * first) / 2
        retired = _subsets(terminal, graph.shape.batch, first, zero, saved)
        joining = _subsets(ready, decode_rows(following, 0), whole, zero)
        made_ready = _subsets(newly, graph.shape.batch, whole, zero)
        for prompt in self._following_prompts(enabled, following):
            counted = sum(bool(lane.row.stages) for lane in prompt)
            most = decode_rows(following, len(prompt))
            fixed = sum((lane.value(whole) for lane in prompt), zero)
            fixed_service = sum((lane.service for lane in prompt), zero)
            for value, service, chosen in made_ready:
                room = graph.shape.batch - counted - len(chosen)
                if len(chosen) > most or room < 0 or not counted + len(chosen):
                    continue
                for more, more_service, others in joining:
                    if len(chosen) + len(others) > most:
                        continue
                    for last, last_service, gone in retired:
                        if len(gone) <= room:
                            yield self._draft(
                                graph,
                                fixed + value + more + last,
                                fixed_service + service + more_service + last_service,
                                prompt,
                                chosen + others,
                                gone,
                                following,
                            )
