"""The decision: the best candidate of all kinds, or why nothing is submitted.

Owns `select`, which is pure and total, and the window's rules (docs/scheduling.md, "Window and holds"). Does not own
any state or what a commit checks. Surprising rule: a winner that must wait for the window to drain is waited for;
nothing of lower value slips in before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocked import Blocked
from .board import Board
from .compiled import Compiled
from .decode import round_pool
from .lanes import Option
from .order import PROBED, Head, Pool, Standing, front, leader, standing, why_lost
from .pairs import pair_pool
from .prefill import prompt_pool
from .probes import probe
from .refresh import refresh
from .stages import stage_pool
from .view import Candidate, Decision, Following, Hold, Plan, Reason, View


def select(view: View, compiled: Compiled | None = None, *, explain: bool = False) -> Decision:
    """Choose the graph and cohort with the greatest value per ms (docs/scheduling.md, "Score").

    `compiled` is the catalog of the view's graphs, in their order; it is made here if not given. `explain` adds every
    candidate, best first, with the terms of its score and why it lost.
    """
    return decide(Board.of(view, compiled), explain=explain)


def decide(board: Board, *, explain: bool = False) -> Decision:
    """The same for a view that is sorted out already."""
    view = board.view
    blocked = Blocked.of(board)
    pools = _pools(board, blocked, every=explain)
    heads = front(pools)
    if blocked is not None:
        pairs = _pairs(blocked, heads, every=explain)
        pools += pairs
        heads = front(pairs, heads)
    best = leader(heads)
    if best is None:
        return Decision(None, Hold.NOTHING_READY, None, _explained(pools, None, None) if explain else ())
    ordinary, reason = best, Reason.ORDINARY if best.option.graph.duration_ns > 0 else Reason.DISCOVERY
    extra: list[tuple[Pool, int]] = []
    if view.refresh_funded and reason is Reason.ORDINARY:
        stale = refresh(view, pools, blocked, best.option.graph)
        if stale is not None:
            best, reason = stale, Reason.TIMING_REFRESH
    if view.probe_funded and reason is Reason.ORDINARY:
        probing = probe(board, best)
        if probing is not None:
            best, reason = probing.leader, Reason.ACCEPTANCE_PROBE
            extra.append((probing.pool, probing.candidate))
    candidates = _explained(pools, best.place, ordinary.place, extra) if explain else ()
    plan = _plan(view, *best, reason)
    if view.window and view.overrun:
        return Decision(None, Hold.OVERRUN, None, candidates)
    if view.window and (plan.needs_empty_window or _closed(view)):
        return Decision(None, Hold.WAITING_FOR_DRAIN, plan, candidates)
    return Decision(plan, None, None, candidates)


def _pools(board: Board, blocked: Blocked | None, *, every: bool) -> list[Pool]:
    """The candidates of one graph, of all kinds; `every`: with those that do not compete."""
    pools: tuple[Pool | None, ...] = (
        round_pool(board, every=every),
        prompt_pool(board, board.times.prompts, board.prompt_cohorts, every=every),
        prompt_pool(board, board.times.scored, board.scored_cohorts, every=every),
        None if blocked is None else stage_pool(blocked, every=every),
    )
    return [pool for pool in pools if pool is not None]


def _pairs(blocked: Blocked, singles: Sequence[Head], *, every: bool) -> list[Pool]:
    """The candidates of two graphs: those that can win against the best `singles`, or the best of `every` pair."""
    if not singles:
        pool = pair_pool(blocked, every=every)
    elif singles[0].known:
        pool = pair_pool(blocked, known=-singles[0].value, every=every)
    else:
        pool = pair_pool(blocked, unknown=-singles[0].value, every=every)
    return [] if pool is None else [pool]


def _closed(view: View) -> bool:
    """Whether a frame in flight must complete before anything is queued behind it."""
    shapes = [frame.shape for frame in view.window]
    queueable = [row.shape for row in view.graphs if row.shape in shapes and not row.runs_alone]
    return any(shape not in queueable for shape in shapes)


def _needs_empty_window(option: Option) -> bool:
    return option.graph.drains or any(row.needs_feedback for row in option.requests)


def _plan(view: View, place: Standing, option: Option, reason: Reason) -> Plan:
    graph = option.graph
    return Plan(
        shape=graph.shape,
        lanes=option.lanes,
        duration_ns=graph.duration_ns,
        observation_age_ns=view.now_ns - graph.observed_at_ns if graph.duration_ns > 0 else None,
        score=-place.value,
        log_scale=view.log_scale,
        reason=reason,
        needs_empty_window=_needs_empty_window(option),
        following=_following(option),
        allocates=option.allocates,
    )


def _following(option: Option) -> Following | None:
    sequel = option.sequel
    return None if sequel is None else Following(sequel.graph.shape, sequel.lanes, sequel.graph.duration_ns)


def _explained(
    pools: Sequence[Pool],
    winner: Standing | None,
    ordinary: Standing | None,
    extra: Sequence[tuple[Pool, int]] = (),
) -> tuple[Candidate, ...]:
    """All candidates, those that compete first, each part in the total order. A probe that won is `extra`, priced by
    what it may come to; the others are compared with the `ordinary` winner then."""
    found: list[tuple[bool, Standing, Candidate]] = []
    for pool, indices in [(pool, range(len(pool.terms.score))) for pool in pools] + [(p, [i]) for p, i in extra]:
        terms = pool.terms
        for index in indices:
            option = pool.option(index)
            place, sequel = standing(terms, index, option), option.sequel
            barred = None if terms.eligible[index] else pool.barred(index)
            lost = barred or _lost(place, winner, ordinary, probed=bool(extra))
            lanes = option.lanes + (sequel.lanes if sequel else ())
            candidate = Candidate(
                shape=option.graph.shape,
                slots=place.slots,
                tokens=sum([lane.tokens for lane in lanes]),
                duration_ns=option.graph.duration_ns,
                service=float(terms.service[index]),
                age_term=float(terms.age[index]),
                waiting_cost=float(terms.waiting[index]),
                score=float(terms.score[index]),
                needs_empty_window=_needs_empty_window(option),
                lost=lost,
                following=_following(option),
                newly=sequel.newly if sequel else 0,
                ready=len(sequel.lanes) - sequel.newly if sequel else 0,
                terminal=option.terminal,
                gap_cost=0.0 if terms.gap is None else float(terms.gap[index]),
                targets=option.targets,
                allocates=option.allocates,
            )
            found.append((barred is not None, place, candidate))
    found.sort(key=lambda entry: entry[:2])
    return tuple([candidate for _, _, candidate in found])


def _lost(place: Standing, winner: Standing | None, ordinary: Standing | None, *, probed: bool) -> str | None:
    """Why a candidate that competes lost; None if it won."""
    if winner is None or ordinary is None or place == winner:
        return None
    if probed:
        return PROBED if place == ordinary else why_lost(place, ordinary)
    return why_lost(place, winner)
