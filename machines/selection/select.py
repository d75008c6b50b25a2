"""The decision: the best candidate of all kinds, or why nothing is submitted.

Owns `select`, which is pure and total, and the window's rules (docs/scheduling.md, "Window and holds"). Does not own
any state or what a commit checks. Surprising rule: a winner that must wait for the window to drain is waited for;
nothing of lower value slips in before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import GraphKind
from .decode import decode_pool
from .lanes import Option, decoding
from .order import Pool, Standing, champion, standing, why_lost
from .prefill import prefill_pool
from .view import Candidate, Decision, Hold, Phase, Plan, Reason, View


def select(view: View, *, explain: bool = False) -> Decision:
    """Choose the graph and cohort with the greatest value per ms (docs/scheduling.md, "Score").

    `explain` adds every candidate, best first, with the terms of its score and why it lost.
    """
    pools = _pools(view)
    best: tuple[Standing, Option] | None = None
    for pool in pools:
        index = champion(pool)
        if index is not None:
            option = pool.option(index)
            place = standing(pool.terms, index, option)
            if best is None or place < best[0]:
                best = place, option
    candidates = _explained(pools, best[0] if best else None) if explain else ()
    if best is None:
        return Decision(None, Hold.NOTHING_READY, None, candidates)
    plan = _plan(view, *best)
    if view.window and view.overrun:
        return Decision(None, Hold.OVERRUN, None, candidates)
    if view.window and (plan.needs_empty_window or _closed(view)):
        return Decision(None, Hold.WAITING_FOR_DRAIN, plan, candidates)
    return Decision(plan, None, None, candidates)


def _pools(view: View) -> list[Pool]:
    streams = decoding(view)
    pools: tuple[Pool | None, ...] = (
        decode_pool(view, streams),
        prefill_pool(view, Phase.PREFILL, GraphKind.PREFILL, len(streams)),
        prefill_pool(view, Phase.SCORED_PREFILL, GraphKind.SCORED_PREFILL, len(streams)),
    )
    return [pool for pool in pools if pool is not None]


def _closed(view: View) -> bool:
    """Whether a frame in flight must complete before anything is queued behind it."""
    shapes = [frame.shape for frame in view.window]
    queueable = [row.shape for row in view.graphs if row.shape in shapes and not row.runs_alone]
    return any(shape not in queueable for shape in shapes)


def _needs_empty_window(option: Option) -> bool:
    return option.graph.runs_alone or any(row.needs_feedback for row in option.requests)


def _plan(view: View, place: Standing, option: Option) -> Plan:
    graph = option.graph
    known = graph.duration_ns > 0
    return Plan(
        shape=graph.shape,
        lanes=option.lanes,
        duration_ns=graph.duration_ns,
        observation_age_ns=view.now_ns - graph.observed_at_ns if known else None,
        score=-place.value,
        log_scale=view.log_scale,
        reason=Reason.ORDINARY if known else Reason.DISCOVERY,
        needs_empty_window=_needs_empty_window(option),
    )


def _explained(pools: Sequence[Pool], winner: Standing | None) -> tuple[Candidate, ...]:
    """All candidates, those that compete first, each part in the total order."""
    found: list[tuple[bool, Standing, Candidate]] = []
    for pool in pools:
        terms = pool.terms
        for index in range(len(terms.score)):
            option = pool.option(index)
            place = standing(terms, index, option)
            barred = None if terms.eligible[index] else pool.barred(index)
            lost = barred or (None if winner is None or place == winner else why_lost(place, winner))
            candidate = Candidate(
                shape=option.graph.shape,
                slots=place.slots,
                tokens=sum([lane.tokens for lane in option.lanes]),
                duration_ns=option.graph.duration_ns,
                service=float(terms.service[index]),
                age_term=float(terms.age[index]),
                waiting_cost=float(terms.waiting[index]),
                score=float(terms.score[index]),
                needs_empty_window=_needs_empty_window(option),
                lost=lost,
            )
            found.append((barred is not None, place, candidate))
    found.sort(key=lambda entry: entry[:2])
    return tuple([candidate for _, _, candidate in found])
