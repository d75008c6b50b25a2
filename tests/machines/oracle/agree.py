"""Whether a decision is the enumeration's.

Owns the comparison of `select` with the oracle, lane by lane. Surprising rule: where a rival is too close for floating
point to tell, any of them will do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flare.machines.graph import GraphShape
from flare.machines.selection.view import Candidate, Decision, Hold, LaneWork, Phase, Plan, RequestRow, View

from .choices import Choice, Expected, Identity, Oracle
from .drafts import Draft
from .shares import allocates
from .values import chances, emits

CLOSE = 1e-9


def work_of(plan: Plan) -> Identity:
    """What tells one plan from another, in the form of `Choice.work`."""
    following = plan.following
    return (
        plan.shape,
        tuple((lane.slot, lane.tokens) for lane in plan.lanes),
        following.shape if following else None,
        tuple((lane.slot, lane.tokens) for lane in following.lanes) if following else (),
    )


def lane_work(row: RequestRow, tokens: int, shape: GraphShape, expected_rows: int) -> LaneWork:
    """What a lane must say of itself; `expected_rows` are those that a round of output is expected to verify for it."""
    if not tokens:
        return LaneWork(row.slot, row.generation, row.position, 0, emits=False, delivers=False, expected_tokens=0.0)
    decoding = row.phase is Phase.DECODE
    ends = decoding or emits(row, tokens)
    expected = 1.0 + sum(chances(row, shape)[0][: expected_rows - 1]) if decoding else float(tokens + ends)
    return LaneWork(
        row.slot, row.generation, row.position, tokens, emits=ends, delivers=decoding, expected_tokens=expected
    )


def check_lanes(view: View, lanes: Iterable[LaneWork], shape: GraphShape, draft: Draft) -> None:
    """Every field of every lane."""
    rows = {row.slot: row for row in view.requests}
    used = {lane.row.slot: lane.tokens for lane in draft.decoders}
    for lane in lanes:
        wanted = lane_work(rows[lane.slot], lane.tokens, shape, used.get(lane.slot, lane.tokens))
        assert lane.expected_tokens == pytest.approx(wanted.expected_tokens, rel=1e-12)
        assert (lane.generation, lane.start) == (wanted.generation, wanted.start)
        assert (lane.emits, lane.delivers) == (wanted.emits, wanted.delivers)


def check_plan(view: View, plan: Plan, choice: Choice) -> None:
    """What a plan says beside its work and score."""
    graph = choice.graph
    age = view.now_ns - graph.observed_at_ns if graph.duration_ns else None
    assert (plan.duration_ns, plan.observation_age_ns) == (graph.duration_ns, age)
    assert plan.log_scale == view.log_scale
    assert plan.allocates == allocates(view, plan.shape)
    check_lanes(view, plan.lanes, plan.shape, choice.draft)
    if plan.following is not None:
        assert choice.draft.following is not None
        assert plan.following.duration_ns == choice.draft.following.duration_ns
        check_lanes(view, plan.following.lanes, plan.following.shape, choice.draft)


def close_to(draft: Draft) -> Any:
    """A number equal to the candidate's score to 1e-9, as far as the difference of the score's two sides is exact."""
    slack = 1e-3 * CLOSE * float(draft.gain + draft.cost)
    return pytest.approx(float(draft.score), rel=CLOSE, abs=max(1e-300, slack))


def check_terms(candidate: Candidate) -> None:
    """The terms of a score that is explained make up the score."""
    following = candidate.following
    parts = [candidate.duration_ns] + ([following.duration_ns] if following else [])
    if all(parts):
        gain = (candidate.service + candidate.age_term) / (sum(parts) / 1e6)
        cost = candidate.waiting_cost + candidate.gap_cost
        assert candidate.score == pytest.approx(gain - cost, rel=CLOSE, abs=1e-12 * (gain + cost))
    else:
        assert (candidate.score, candidate.age_term, candidate.gap_cost) == (candidate.service, 0.0, 0.0)


def check(view: View, decision: Decision, oracle: Oracle) -> Expected:
    """Fail unless `decision` is what the enumeration expects; gives what it expects."""
    wanted = oracle.expected(CLOSE)
    if not wanted.choices:
        assert decision == Decision(None, Hold.NOTHING_READY, None)
        return wanted
    if wanted.hold is Hold.OVERRUN:
        assert (decision.plan, decision.hold, decision.awaited) == (None, Hold.OVERRUN, None)
        return wanted
    if len({oracle.alone(choice) for choice in wanted.choices}) == 1:
        assert decision.hold is wanted.hold
    assert decision.hold in (None, Hold.WAITING_FOR_DRAIN)
    plan, other = decision.plan, decision.awaited
    if decision.hold is not None:
        plan, other = other, plan
    assert plan is not None
    assert other is None
    by_work = {choice.work: choice for choice in wanted.choices}
    assert work_of(plan) in by_work, f"expected {wanted.choices[0].work}"
    choice = by_work[work_of(plan)]
    assert plan.score == close_to(choice.draft)
    check_plan(view, plan, choice)
    assert (plan.reason, plan.needs_empty_window) == (wanted.reason, oracle.alone(choice))
    return wanted
