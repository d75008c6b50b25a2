"""Speculative rounds and mixed frames through the scheduler: commit, projection, validation and what is learned."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flare.machines.beliefs import Beliefs
from flare.machines.commitment import CommitRefused
from flare.machines.events import CompletionRecord, Effect, HostStop, RequestLost
from flare.machines.execution import Request
from flare.machines.graph import GraphShape, Source
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason
from flare.machines.selection.view import Plan

from .rig import (
    CATALOG,
    MIXED,
    MS,
    NARROW,
    PAIR,
    PREFILL,
    ROUND,
    WIDE_MIXED,
    Rig,
    decode,
    decode_lane,
    plan_of,
    prefill,
)
from .test_accounting import charged, close, token_price
from .test_snapshot import row

WIDE = (*CATALOG, ROUND, MIXED, WIDE_MIXED)


def round_of(request: Request, targets: int, shape: GraphShape = ROUND, expected: float | None = None) -> Plan:
    lane = decode_lane(request, targets)
    return plan_of(shape, replace(lane, expected_tokens=expected or lane.expected_tokens))


def committed(rig: Rig, request: Request, tokens: int, ended: EndReason | None = None) -> list[Effect]:
    """The oldest frame commits so many tokens of its only lane."""
    assert request.handle is not None
    record = CompletionRecord(request.handle, request.committed + tokens, ended)
    return rig.complete(record, after_ms=15)


def beliefs(request: Request) -> Beliefs:
    assert request.beliefs is not None
    return request.beliefs


def survival(request: Request) -> tuple[float, ...]:
    return beliefs(request).acceptance[Source.DRAFT].survival


def lost(effects: list[Effect]) -> list[str]:
    return [effect.error for effect in effects if isinstance(effect, RequestLost)]


def test_a_round_commits_what_was_accepted_and_learns_from_it() -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=40)
    assert survival(request) == (0.5, 0.25, 0.125)
    rig.commit(round_of(request, 4))
    committed(rig, request, 2)
    assert request.produced == 3
    first, second, third = survival(request)
    assert first > 0.5 and second < 0.25 and third < 0.125
    seen = row(rig.scheduler.view(rig.now_ns), request)
    assert (seen.survival, seen.scored_survival) == (survival(request), survival(request))
    other = rig.arrive(8)
    assert survival(other) == (0.5 + 0.5 / 64, 0.25 - 0.25 / 64, 0.125 - 0.125 / 64)


def test_an_end_censors_what_lies_beyond() -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=40)
    rig.commit(round_of(request, 4))
    before = survival(request)
    committed(rig, request, 2, EndReason.STOP)
    assert survival(request)[0] > before[0] and survival(request)[1:] == before[1:]


def test_rounds_of_one_target_and_frames_without_proposals_observe_nothing() -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=40)
    before = survival(request)
    rig.run(round_of(request, 1))
    rig.run(decode(request))
    assert survival(request) == before and request.produced == 3


def test_the_exponent_is_for_scores_alone() -> None:
    rig = Rig(catalog=WIDE, alpha=2.0)
    (request,) = rig.decoding(1)
    seen = row(rig.scheduler.view(rig.now_ns), request)
    assert (seen.survival, seen.scored_survival) == ((0.5, 0.25, 0.125), (0.25, 0.0625, 0.015625))


def test_nothing_is_proposed_without_a_draft_or_where_the_host_must_see_every_token() -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, needs_feedback=True)
    assert row(rig.scheduler.view(rig.now_ns), request).survival == ()
    with pytest.raises(CommitRefused, match="for 2 targets: its reach is 1"):
        rig.commit(round_of(request, 2))
    rig.run(round_of(request, 1))
    plain = Rig()
    (request,) = plain.decoding(1)
    assert row(plain.scheduler.view(plain.now_ns), request).survival == ()


def test_queued_rounds_project_their_ceiling_and_their_expected_tokens() -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=8)
    rig.commit(round_of(request, 4, expected=1.8))
    seen = row(rig.scheduler.view(rig.now_ns), request)
    assert seen.output_left == 8 - 1 - 4
    assert seen.token_price == close(charged(token_price(request), 1.8, 15))
    with pytest.raises(CommitRefused, match="for 4 targets: its reach is 3"):
        rig.commit(round_of(request, 4))
    rig.commit(round_of(request, 3))
    assert row(rig.scheduler.view(rig.now_ns), request).output_left == 0
    committed(rig, request, 1)
    assert row(rig.scheduler.view(rig.now_ns), request).output_left == 8 - 2 - 3


@pytest.mark.parametrize(
    ("targets", "shape", "reach"), [(5, ROUND, 4), (4, NARROW, 3), (0, ROUND, 4), (-1, ROUND, 4), (2, CATALOG[1], 1)]
)
def test_targets_beyond_the_graph_are_refused(targets: int, shape: GraphShape, reach: int) -> None:
    rig = Rig(catalog=(*WIDE, NARROW))
    (request,) = rig.decoding(1, max_tokens=40)
    with pytest.raises(CommitRefused, match=f"for {targets} targets: its reach is {reach}"):
        rig.commit(round_of(request, targets, shape))


@pytest.mark.parametrize(
    ("tokens", "ended", "error"),
    [
        (0, None, "committed 0 tokens instead of 1 to 3"),
        (4, None, "committed 4 tokens instead of 1 to 3"),
        (-1, None, "committed -1 tokens instead of 1 to 3"),
        (3, None, "reached its limit and did not end"),
        (2, EndReason.LENGTH, "ended by length before its limit"),
    ],
)
def test_malformed_rounds(tokens: int, ended: EndReason | None, error: str) -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=4)
    rig.commit(round_of(request, 3))
    assert lost(committed(rig, request, tokens, ended)) == [f"malformed completion: slot 0 {error}"]


@pytest.mark.parametrize(
    ("tokens", "ended"), [(1, None), (3, EndReason.LENGTH), (2, EndReason.STOP), (3, EndReason.STOP)]
)
def test_every_prefix_of_a_round_may_be_committed(tokens: int, ended: EndReason | None) -> None:
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=4)
    rig.commit(round_of(request, 3))
    assert lost(committed(rig, request, tokens, ended)) == []
    assert (request.produced, request.end_reason) == (1 + tokens, ended)


def test_a_round_that_comes_after_the_end_is_not_looked_at() -> None:
    """The row had ended on the device: the frame behind commits nothing, and says nothing of acceptance."""
    rig = Rig(catalog=WIDE)
    (request,) = rig.decoding(1, max_tokens=20)
    rig.commit(round_of(request, 4))
    rig.commit(round_of(request, 4))
    committed(rig, request, 2, EndReason.STOP)
    before = survival(request)
    assert lost(committed(rig, request, 0)) == []
    assert survival(request) == before and rig.scheduler.idle


def test_a_mixed_frame_serves_each_row_by_its_phase() -> None:
    rig = Rig(catalog=WIDE)
    first, second = rig.decoding(2, max_tokens=40)
    third, fourth = rig.arrive(10), rig.arrive(20)
    lanes = (*prefill(third, 10).lanes, *prefill(fourth, 6).lanes, decode_lane(first), decode_lane(second))
    rig.run(plan_of(MIXED, *lanes))
    assert [(r.consumed, r.produced) for r in (first, second, third, fourth)] == [(8, 2), (8, 2), (10, 1), (6, 0)]
    assert (third.state, fourth.state) == (RequestState.DECODING, RequestState.PREFILLING)
    wide = plan_of(WIDE_MIXED, *prefill(fourth, 14).lanes, decode_lane(first, 2))
    before = survival(first)
    rig.run(wide)
    assert (first.produced, fourth.produced) == (4, 1)
    assert survival(first)[0] > before[0] and survival(first)[1:] == before[1:]


def test_prompts_share_the_capacity_of_a_frame() -> None:
    rig = Rig(catalog=(*WIDE, PAIR))
    first, second, third = (rig.arrive(12) for _ in range(3))
    (decoding,) = rig.decoding(1)
    lanes = [prefill(request, 6).lanes[0] for request in (first, second, third)]
    with pytest.raises(CommitRefused, match="mixed/b4t16r2 cannot consume 18 tokens of 3 prompts"):
        rig.commit(plan_of(MIXED, *lanes))
    with pytest.raises(CommitRefused, match="cannot consume 20 tokens of 2 prompts"):
        rig.commit(plan_of(PAIR, *prefill(first, 12).lanes, *prefill(second, 8).lanes))
    with pytest.raises(CommitRefused, match="slot 3 is in phase decode"):
        rig.commit(plan_of(PREFILL, decode_lane(decoding)))
    scored = Rig(catalog=WIDE)
    request = scored.arrive(8, scored=True)
    with pytest.raises(CommitRefused, match="slot 0 is in phase scored_prefill"):
        scored.commit(plan_of(MIXED, *prefill(request, 8).lanes))
    rig.run(plan_of(PAIR, *prefill(first, 12).lanes, *prefill(second, 4).lanes))
    assert (first.produced, second.consumed) == (1, 4)


def test_a_row_that_was_stopped_does_not_spoil_its_mixed_frame() -> None:
    rig = Rig(catalog=WIDE)
    (first,) = rig.decoding(1)
    second = rig.arrive(8)
    rig.commit(plan_of(MIXED, *prefill(second, 8).lanes, decode_lane(first)))
    rig.scheduler.apply(HostStop(first.id), rig.now_ns)
    rig.now_ns += 30 * MS
    rig.complete()
    assert (second.state, first.state) == (RequestState.DECODING, RequestState.RETIRED)


def test_rounds_may_overlap_and_mixed_frames_may_not() -> None:
    rig = Rig(catalog=WIDE)
    first, second = rig.decoding(2, max_tokens=40)
    rig.commit(round_of(first, 4))
    rig.commit(decode(second))
    rig.complete(after_ms=15)
    with pytest.raises(CommitRefused, match="needs completion feedback"):
        rig.commit(plan_of(MIXED, decode_lane(first)))
