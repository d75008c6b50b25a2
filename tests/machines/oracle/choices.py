"""The decision by enumeration: the total order over every legal candidate, the filters, the refresh and the window.

Owns what is expected of `select`. Does not own values (`values`) or the enumeration (`drafts`). Surprising rule: a
filter is asked of each candidate in turn, best first: whether a smaller prepared graph could do just the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.selection.view import GraphRow, Hold, Phase, Reason, RequestRow, View

from .drafts import Draft, Drafts, decode_rows, packed, prompt_rows
from .probes import probes
from .shares import asked
from .values import Lane, Number, Values, drains, queueable, serving

Work = tuple[tuple[int, int], ...]
Identity = tuple[GraphShape, Work, GraphShape | None, Work]


@dataclass(frozen=True)
class Choice:
    """A candidate spelled out: (slot, tokens) of each lane. `key` is its place in the order; the smallest wins."""

    draft: Draft
    lanes: Work
    then: Work
    key: tuple[Any, ...]

    @property
    def graph(self) -> GraphRow:
        """The graph that would be dispatched."""
        return self.draft.graph

    @property
    def work(self) -> Identity:
        """All that tells two candidates apart."""
        following = self.draft.following
        return self.graph.shape, self.lanes, following.shape if following else None, self.then


@dataclass(frozen=True)
class Expected:
    """What `select` should answer: a candidate (submitted, or awaited under a hold), the first of `choices` where the
    others are not too close to tell, and its reason."""

    choices: list[Choice]
    reason: Reason | None
    hold: Hold | None


class Oracle:
    """All candidates of one view, in numbers of the kind given."""

    def __init__(self, view: View, number: Callable[[float], Number]) -> None:
        self.view = view
        self.values = Values(view, number)
        self.drafts = Drafts(self.values)
        self.rows = {row.slot: row for row in view.requests}

    @cached_property
    def ranked(self) -> list[Draft]:
        """Every enumerated candidate by value, barred ones too."""
        drafts = list(self.drafts.all())
        if self.values.gap:
            drafts = [draft for draft in drafts if not self._by_cohort(draft)] + self._delayed(drafts)
        return sorted(drafts, key=_rank)

    @staticmethod
    def _by_cohort(draft: Draft) -> bool:
        """Whether the host gap of a candidate depends on whom it serves."""
        return draft.following is None and bool(draft.decoders) and not drains(draft.graph)

    def _delayed(self, drafts: list[Draft]) -> list[Draft]:
        """Of each round whose gap depends on its cohort the best one, chosen without the gap; of those too close to
        tell, which may differ in their gaps, the one that goes first among equals."""
        best: dict[GraphShape, list[Draft]] = {}
        for draft in sorted(filter(self._by_cohort, drafts), key=_rank):
            rivals = best.setdefault(draft.graph.shape, [])
            if (not rivals or _level(rivals[0], draft, 1e-11)) and not self.barred(draft):
                rivals.append(draft)
        chosen = [min(rivals, key=lambda draft: self.choice(draft).key[3:]) for rivals in best.values() if rivals]
        return [self.drafts.delayed(draft) for draft in chosen]

    # Filters

    def _left_out(self, draft: Draft, graph: GraphRow) -> bool:
        """Exploration: `graph`, which would do the prompts of `draft`, need not be measured by them."""
        if graph.duration_ns or not draft.prompts:
            return False
        mine = self._to_endpoint(draft, graph)
        return any(
            other.shape.prefill_tokens < graph.shape.prefill_tokens
            and _extents(other.shape, prompts=False) == _extents(graph.shape, prompts=False)
            and self._to_endpoint(draft, other) == mine
            for other in self.view.graphs
        )

    @staticmethod
    def _to_endpoint(draft: Draft, graph: GraphRow) -> list[int] | None:
        rows = [lane.row for lane in draft.prompts]
        tokens = packed(rows, graph.shape.prefill_tokens)
        if tokens is None:
            return None
        return [min(n, min(r.next_endpoint, r.boundary) - r.position) for n, r in zip(tokens, rows, strict=True)]

    def _redundant(self, draft: Draft, graph: GraphRow) -> bool:
        """A smaller graph of tokens does the same for the same requests."""
        rows = [lane.row for lane in draft.prompts]
        if not draft.following and self._supplied_too_little(draft, graph.shape):
            return True
        return any(
            _smaller(other.shape, graph.shape)
            and not (other.shape.ragged and draft.following)
            and len(rows) <= prompt_rows(other)
            and len(draft.decoders) <= decode_rows(other, len(rows))
            and (not other.shape.ragged or sum(ln.tokens for ln in draft.decoders) <= other.shape.packed_targets)
            and (not rows or packed(rows, other.shape.prefill_tokens) == [lane.tokens for lane in draft.prompts])
            and not self._left_out(draft, other)
            for other in self.view.graphs
        )

    def _supplied_too_little(self, draft: Draft, shape: GraphShape) -> bool:
        """A program of copies would not even fill one of fewer proposals."""
        family = [graph.shape for graph in self.view.graphs if graph.shape.width == shape.width]
        if shape.source is not Source.COPY or any(s.ragged and s.source is Source.COPY for s in family):
            return False
        most = max(lane.tokens for lane in draft.decoders)
        return any(
            other.shape.kind is shape.kind
            and (other.shape.source is Source.COPY or other.shape.width == 1)
            and not other.shape.ragged
            and other.shape.drafts
            and most <= other.shape.width < shape.width
            and len(draft.decoders) <= other.shape.batch <= shape.batch
            for other in self.view.graphs
        )

    def barred(self, draft: Draft) -> bool:
        """Whether exploration or the filter of redundant shapes keeps a candidate out."""
        tokens = draft.following or (draft.graph if draft.prompts or draft.decoders else None)
        if tokens is not None and (self._left_out(draft, tokens) or self._redundant(draft, tokens)):
            return True
        if tokens is draft.graph:
            return False
        mine = self._first_rows(draft, draft.graph.shape.batch)
        return any(
            _smaller(other.shape, draft.graph.shape) and self._first_rows(draft, other.shape.batch) == mine
            for other in self.view.graphs
        )

    # Spelling out

    def _first_rows(self, draft: Draft, batch: int) -> set[int] | None:
        """Slots in a graph of stages of `batch` rows, those that advance for free too; None if they do not fit."""
        taken = [lane.row for lane in (*draft.enabled, *draft.operations)]
        if len(taken) > batch:
            return None
        slots = {row.slot for row in taken}
        free = [row for row in self._free(draft) if row.slot not in slots]
        return slots | {row.slot for row in free[: batch - len(slots)]}

    def _free(self, draft: Draft) -> list[RequestRow]:
        kind, following = draft.graph.shape.kind, draft.following
        last = sorted(self.drafts.last_stage(kind), key=serving)
        if following is None:
            return last
        values, graph_ms = self.values, self.values.spent(draft.graph)
        until = graph_ms + values.spent(following)

        def worth(lane: Lane) -> Number:
            return lane.value(until) if draft.known else lane.service

        # Prompts that the following graph does not take are like any other row.
        could = [(row, values.lane(row, following)) for row in last if row.phase is Phase.DECODE]
        served = [(row, lane) for row, lane in could if lane is not None]
        served.sort(key=lambda pair: -worth(pair[1]))
        first = [row.slot for row, _ in served]
        chains = [self.drafts.chain_lane(row, graph_ms) for row in self.drafts.next_stage(kind)]
        chains.sort(key=lambda lane: (-lane.service, *serving(lane.row)))
        others = [row for row in last if row.slot not in first]
        return [row for row, _ in served] + others + [lane.row for lane in chains]

    def choice(self, draft: Draft) -> Choice:
        """Spell a candidate out."""
        shape, following = draft.graph.shape, draft.following
        used = draft.prompts + draft.decoders
        tokens = tuple(sorted((lane.row.slot, asked(self.view, lane, following or draft.graph)) for lane in used))
        if following is None and not draft.operations:
            lanes, then = tokens, tokens[:0]
            padding = _positions(shape) - sum(lane.tokens for lane in used)
        else:
            slots = sorted(self._first_rows(draft, shape.batch) or ())
            lanes, then = tuple((slot, 0) for slot in slots), tokens
            padding = shape.batch - len(slots)
        served = sorted({slot for slot, _ in lanes + then})
        after = tuple(slot for slot, _ in then)
        key = (
            draft.known,
            -draft.score,
            draft.whole,
            -len(served),
            self._fences(served),
            padding,
            tuple(served),
            shape,
            () if following is None else (following.shape, self._fences(after), after),
        )
        return Choice(draft, lanes, then, key)

    def _fences(self, slots: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.rows[slot].last_fence for slot in slots))

    # The decision

    def best(self, behind: float = 0.0) -> list[Choice]:
        """The candidates that compete and are at most `behind` (relative) worse than the best, in order."""
        found: list[Draft] = []
        for draft in self.ranked:
            if found and not _level(found[0], draft, behind):
                break
            if not self.barred(draft):
                found.append(draft)
        return sorted((self.choice(draft) for draft in found), key=lambda choice: choice.key)

    def refreshed(self, winner: Choice, behind: float = 0.0) -> list[Choice]:
        """The candidates of the stale graph that displaces `winner` where a refresh is funded, as `best` gives them."""
        if not self.view.refresh_funded or not winner.graph.duration_ns:
            return []
        best: dict[GraphShape, list[Draft]] = {}
        for draft in self.ranked:
            graph = draft.graph
            if graph.stale and graph.duration_ns and graph.shape != winner.graph.shape:
                rivals = best.setdefault(graph.shape, [])
                if (not rivals or _level(rivals[0], draft, behind)) and not self.barred(draft):
                    rivals.append(draft)

        def seniority(choices: list[Choice]) -> tuple[int, tuple[Any, ...]]:
            graph = choices[0].graph
            return max(graph.observed_at_ns, graph.attempted_at_ns), choices[0].key

        spelled = [[self.choice(draft) for draft in rivals] for rivals in best.values() if rivals]
        ordered = [sorted(choices, key=lambda choice: choice.key) for choices in spelled]
        return min(ordered, key=seniority, default=[])

    def probing(self, winner: Choice, behind: float = 0.0) -> list[Choice]:
        """What displaces a measured `winner` where an acceptance probe is funded, those too close to tell included."""
        if not self.view.probe_funded or self.view.keeps_prefixes or not winner.draft.known:
            return []
        hopeful = Oracle(hoping(self.view), self.values.number)
        best: dict[GraphShape, Choice] = {}
        for draft in hopeful.ranked:
            if draft.known and draft.following is None and draft.graph.shape not in best and not hopeful.barred(draft):
                best[draft.graph.shape] = hopeful.choice(draft)
        return probes(winner, list(best.values()), self.values, behind)

    def expected(self, behind: float = 0.0) -> Expected:
        """The whole answer, of equals and of those at most `behind` worse the first."""
        best = self.best(behind)
        if not best:
            return Expected([], None, Hold.NOTHING_READY)
        refreshed = self.refreshed(best[0], behind)
        probing = [] if refreshed else self.probing(best[0], behind)
        choices = refreshed or probing or best
        reason = Reason.ORDINARY if choices[0].graph.duration_ns else Reason.DISCOVERY
        reason = Reason.TIMING_REFRESH if refreshed else Reason.ACCEPTANCE_PROBE if probing else reason
        alone = self.alone(choices[0])
        by_shape = {row.shape: row for row in self.view.graphs}
        flying = [by_shape.get(frame.shape) for frame in self.view.window]
        hold = None
        if self.view.window and self.view.overrun:
            hold = Hold.OVERRUN
        elif self.view.window and (alone or not all(row and queueable(row) for row in flying)):
            hold = Hold.WAITING_FOR_DRAIN
        return Expected(choices, reason, hold)

    def close_packing(self) -> bool:
        """Whether rounding may decide the packing order of a view that has graphs of several prompt rows."""
        if all(prompt_rows(graph) < 2 for graph in self.view.graphs):
            return False
        for order in self.drafts.orders.values():
            worth = [float(self.values.per_token(row)) for row in order]
            if any(abs(a - b) <= 1e-12 * max(a, b) for a, b in pairwise(worth)):
                return True
        return False

    def alone(self, choice: Choice) -> bool:
        """Whether a plan needs an empty window."""
        return drains(choice.graph) or any(self.rows[slot].needs_feedback for slot, _ in choice.lanes)


def _level(best: Draft, other: Draft, behind: float) -> bool:
    """Whether `other` is at most `behind` worse, relative to the score, or a thousandth of that to its two sides."""
    if (best.known, best.score) == (other.known, other.score):
        return True
    if best.known != other.known or not behind:
        return False
    sides = max(best.gain + best.cost, other.gain + other.cost)
    return bool(best.score - other.score <= behind * max(abs(best.score), 1e-3 * sides))


def hoping(view: View) -> View:
    """The same view with all yields at their optimistic estimates."""
    rows = [
        msgspec.structs.replace(row, scored_survival=row.optimistic, copy_scored_survival=row.copy_optimistic)
        for row in view.requests
    ]
    return msgspec.structs.replace(view, requests=tuple(rows))


def _rank(draft: Draft) -> tuple[bool, Number]:
    return draft.known, -draft.score


def _extents(shape: GraphShape, *, prompts: bool = True) -> tuple[Any, ...]:
    """What tells shapes apart; without the prompt capacity if `prompts` is false."""
    fixed: Iterable[Any] = (shape.kind, shape.batch, shape.prompt_rows, shape.width, shape.draft_depth, shape.drafts)
    return (*fixed, shape.prefill_tokens if prompts else 0)


def _smaller(one: GraphShape, other: GraphShape) -> bool:
    """Same kind, source and round; no capacity greater, and one smaller."""
    if (one.kind, one.width, one.draft_depth, one.drafts) != (other.kind, other.width, other.draft_depth, other.drafts):
        return False
    if one.source is not other.source:
        return False
    mine = one.batch, one.prefill_tokens, one.prompt_rows, one.packed_targets
    theirs = other.batch, other.prefill_tokens, other.prompt_rows, other.packed_targets
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _positions(shape: GraphShape) -> int:
    """Token positions of a graph of tokens."""
    if shape.kind is GraphKind.MIXED:
        return shape.prefill_tokens + (shape.batch - 1) * shape.width
    return shape.prefill_tokens or shape.packed_targets or shape.batch * shape.width
