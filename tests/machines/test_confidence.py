"""What a round reports beside its tokens: rows verified, confidence and survival; how it is checked and learned."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import CompletionRecord, Effect, FrameCounted
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.request import EndReason
from flare.machines.selection.view import Plan

from .rig import CATALOG, COPIES, RAGGED, ROUND, UPKEEP, WIDE_MIXED, Rig, decode_lane, plan_of, prefill
from .test_rounds import beliefs, lost, survival
from .test_snapshot import row

WIDE = (*CATALOG, ROUND, RAGGED, UPKEEP, COPIES, WIDE_MIXED)
CONFIDENCE = ((0.8, 0.5, 0.5), (0.8, 0.4, 0.2))
HALVES = (0.5, 0.25, 0.125)


def rig_of(count: int = 1, **fields: bool) -> tuple[Rig, list[Request]]:
    rig = Rig(catalog=WIDE, device_allocates=True, **fields)  # type: ignore[arg-type]
    return rig, rig.decoding(count, max_tokens=40)


def allocated(*lanes: tuple[Request, int]) -> Plan:
    """A round whose ceilings the device works below."""
    return replace(plan_of(RAGGED, *(decode_lane(*lane) for lane in lanes)), allocates=True)


def report(request: Request, tokens: int, ended: EndReason | None = None, **fields: object) -> CompletionRecord:
    assert request.handle is not None
    return CompletionRecord(request.handle, request.committed + tokens, ended, **fields)  # type: ignore[arg-type]


def done(rig: Rig, *records: CompletionRecord) -> list[Effect]:
    return rig.complete(*records, after_ms=15)


def forecast(request: Request) -> tuple[float, ...]:
    known = beliefs(request).forecast
    assert known is not None
    return known.survival


def moved(start: float, towards: float, aged: int) -> object:
    """A fresh estimate after one observation, when `aged` tokens have been produced."""
    weight = 2.0 * 0.5 ** (aged / 128)
    return pytest.approx((weight * start + towards) / (weight + 1.0), rel=1e-12)


def test_only_the_rows_that_were_verified_teach() -> None:
    """Of a ceiling of four, two rows were allocated: nothing is learned of the second proposal."""
    rig, (request, other) = rig_of(2)
    rig.commit(allocated((request, 4), (other, 4)))
    first = report(request, 1, verified=2, confidence=CONFIDENCE)
    assert lost(done(rig, first, report(other, 4, verified=4, confidence=CONFIDENCE))) == []
    assert survival(request) == (moved(0.5, 0.0, 2), *survival(request)[1:])
    assert beliefs(request).acceptance[Source.DRAFT].mean(1) == 0.25
    assert survival(other) == tuple(moved(mean, 1.0, 5) for mean in HALVES)


def test_a_frame_tells_of_the_rounds_in_it() -> None:
    """Targets and output tokens of each lane that had proposals verified."""
    rig, (request, other) = rig_of(2)
    rig.commit(allocated((request, 4), (other, 4)))
    effects = done(
        rig,
        report(request, 1, verified=1, confidence=CONFIDENCE),
        report(other, 2, verified=3, confidence=CONFIDENCE),
    )
    assert [effect.rounds for effect in effects if isinstance(effect, FrameCounted)] == [((3, 2),)]


def test_a_round_that_got_one_row_teaches_nothing_of_acceptance() -> None:
    rig, (request,) = rig_of()
    rig.commit(allocated((request, 4)))
    done(rig, report(request, 1, verified=1, confidence=CONFIDENCE))
    assert survival(request) == HALVES
    assert forecast(request) == tuple(moved(*pair, 2) for pair in zip(HALVES, CONFIDENCE[1], strict=True))


def test_forecasts_average_joint_probabilities_and_move_their_own_prior() -> None:
    rig, (request,) = rig_of()
    rig.commit(allocated((request, 4)))
    done(rig, report(request, 4, verified=4, confidence=CONFIDENCE))
    seen, newcomer = row(rig.scheduler.view(rig.now_ns), request), rig.arrive(8)
    assert seen.forecast == forecast(request)
    assert forecast(newcomer) == tuple(mean + (x - mean) / 64 for mean, x in zip(HALVES, CONFIDENCE[1], strict=True))
    assert survival(newcomer) == tuple(mean + (1.0 - mean) / 64 for mean in HALVES)


def test_forecasts_are_observed_up_to_the_ceiling_alone() -> None:
    """The program drafts three; the lane's ceiling was three rows, and one was allocated."""
    rig, (request,) = rig_of()
    rig.commit(allocated((request, 3)))
    done(rig, report(request, 1, verified=1, confidence=CONFIDENCE))
    assert forecast(request)[:2] == tuple(moved(*pair, 2) for pair in zip(HALVES[:2], CONFIDENCE[1], strict=False))
    assert forecast(request)[2] == HALVES[2]


def test_a_lane_without_proposals_and_one_that_ended_tell_what_was_drafted() -> None:
    """A ceiling of one has no depth to observe; an end censors acceptance, and no forecast."""
    rig, (request, other) = rig_of(2)
    rig.commit(plan_of(ROUND, decode_lane(request, 1), decode_lane(other, 4)))
    ended = report(other, 1, EndReason.STOP, confidence=CONFIDENCE)
    assert lost(done(rig, report(request, 1, confidence=CONFIDENCE), ended)) == []
    assert (survival(request), forecast(request)) == (HALVES, HALVES)
    assert (survival(other), forecast(other)[0]) == (HALVES, moved(0.5, 0.8, 2))


def test_a_forecast_never_rises() -> None:
    rig, (request,) = rig_of()
    for _ in range(10):
        rig.commit(allocated((request, 2)))
        done(rig, report(request, 1, verified=1, confidence=((0.0,) * 3, (0.0,) * 3)))
    assert forecast(request)[0] == forecast(request)[1] == forecast(request)[2] < HALVES[2]


def test_the_exponent_leaves_forecasts_alone() -> None:
    rig = Rig(catalog=WIDE, alpha=2.0)
    (request,) = rig.decoding(1)
    assert row(rig.scheduler.view(rig.now_ns), request).forecast == HALVES


def test_survival_takes_the_place_of_what_was_accepted() -> None:
    rig, (request,) = rig_of()
    rig.commit(plan_of(ROUND, decode_lane(request, 4)))
    done(rig, report(request, 2, survival=(0.9, 0.6, 0.3)))
    assert survival(request) == tuple(moved(mean, x, 3) for mean, x in zip(HALVES, (0.9, 0.6, 0.3), strict=True))


@pytest.mark.parametrize(("known", "first"), [((), 1.0), ((0.9,), 0.9), ((0.9, 0.8, 0.7), 0.9)])
def test_an_end_censors_survival_too(known: tuple[float, ...], first: float) -> None:
    """One proposal was accepted before the end. Where the program does not know its probability, it counts as one."""
    rig, (request,) = rig_of()
    rig.commit(plan_of(ROUND, decode_lane(request, 4)))
    assert lost(done(rig, report(request, 2, EndReason.STOP, survival=known))) == []
    assert survival(request) == (moved(0.5, first, 3), 0.25, 0.125)


def test_a_mixed_frame_that_drafts_teaches_of_its_rounds_alone() -> None:
    rig, (request,) = rig_of()
    prompt = rig.arrive(8)
    rig.commit(plan_of(WIDE_MIXED, decode_lane(request, 2), *prefill(prompt, 8).lanes))
    odd = report(prompt, 9, confidence=((7.0,), (7.0,)), survival=(7.0,), verified=7)
    assert lost(done(rig, report(request, 2, confidence=((0.9,), (0.9,))), odd)) == []
    assert survival(request)[0] == moved(0.5, 1.0, 3) and forecast(request)[0] == moved(0.5, 0.9, 3)
    assert (survival(prompt)[1:], forecast(prompt)[1:]) == (HALVES[1:], HALVES[1:])


SOUND: dict[str, object] = {"verified": 3, "confidence": CONFIDENCE, "survival": (0.5, 0.5)}
NO_PROBABILITY = "has confidence that is no probability, or a longer prefix that is likelier"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"verified": 5}, "verified 5 targets instead of 1 to 4"),
        ({"verified": -1}, "verified -1 targets instead of 1 to 4"),
        ({"verified": 1, "survival": None}, "committed 2 tokens instead of 1"),
        ({"confidence": None}, "has no confidence, by which rows are allocated"),
        ({"confidence": ((0.8, 0.5), (0.8, 0.4))}, "has confidence in other than 3 proposals"),
        ({"confidence": (CONFIDENCE[0], (0.8, 0.4))}, "has confidence in other than 3 proposals"),
        ({"confidence": (CONFIDENCE[0],)}, "has confidence in other than 3 proposals"),
        ({"confidence": ((1.5, 0.5, 0.5), CONFIDENCE[1])}, NO_PROBABILITY),
        ({"confidence": (CONFIDENCE[0], (0.8, 0.4, -0.1))}, NO_PROBABILITY),
        ({"confidence": (CONFIDENCE[0], (0.8, math.nan, 0.1))}, NO_PROBABILITY),
        ({"confidence": (CONFIDENCE[0], (math.inf, 0.4, 0.1))}, NO_PROBABILITY),
        ({"confidence": (CONFIDENCE[0], (0.4, 0.5, 0.2))}, NO_PROBABILITY),
        ({"survival": (0.5,)}, "has survival of 1 prefixes instead of 2"),
        ({"survival": (0.5, 0.5, 0.5)}, "has survival of 3 prefixes instead of 2"),
        ({"survival": (0.5, 0.6)}, "has survival that is no probability, or a longer prefix that is likelier"),
        ({"survival": (math.nan, 0.6)}, "has survival that is no probability, or a longer prefix that is likelier"),
    ],
)
def test_a_malformed_report_fails_its_frame_and_changes_nothing(fields: dict[str, object], error: str) -> None:
    rig, (request, other) = rig_of(2)
    rig.commit(allocated((other, 4), (request, 4)))
    before = rig.arrive(8)
    good = report(other, 2, verified=3, confidence=CONFIDENCE)
    bad = report(request, 2, None, **{**SOUND, **fields})
    assert lost(done(rig, good, bad)) == [f"malformed completion: slot 0 {error}"] * 2
    assert (survival(other), forecast(other), other.produced) == (HALVES, HALVES, 1)
    assert (survival(rig.arrive(8)), forecast(before)) == (HALVES, HALVES)


def test_a_sound_report_is_taken() -> None:
    rig, (request,) = rig_of()
    rig.commit(allocated((request, 4)))
    assert lost(done(rig, report(request, 2, None, **SOUND))) == []


@pytest.mark.parametrize("shape", [COPIES, UPKEEP, CATALOG[1]])
def test_confidence_comes_from_programs_that_draft(shape: GraphShape) -> None:
    rig, (request,) = rig_of()
    rig.commit(plan_of(shape, decode_lane(request, 1)))
    errors = lost(done(rig, report(request, 1, confidence=((), ()))))
    assert errors == ["malformed completion: slot 0 has confidence in proposals that the program did not make"]


def test_no_more_rows_are_verified_than_there_are() -> None:
    """Three ceilings of four in eight rows: what counts is what was verified, of the requests that are still there."""
    rig, (first, second, third) = rig_of(3)
    rig.commit(allocated((first, 4), (second, 4), (third, 4)))
    records = [report(one, 1, verified=3, confidence=CONFIDENCE) for one in (first, second, third)]
    assert lost(done(rig, *records)) == ["malformed completion: it verified 9 targets in 8 rows"] * 3


def test_ceilings_may_exceed_the_rows_only_where_the_device_allocates() -> None:
    rig, (first, second, third) = rig_of(3)
    lanes = [decode_lane(one, 3) for one in (first, second, third)]
    with pytest.raises(CommitRefused, match="speculative/b4d3w4p8 cannot verify 9 targets"):
        rig.commit(plan_of(RAGGED, *lanes))
    rig.run(plan_of(RAGGED, *lanes[:2]))
    rig.commit(allocated((first, 3), (second, 3), (third, 3)))


def test_a_queued_lane_advances_by_no_more_than_the_rows_that_there_are() -> None:
    tight = GraphShape(GraphKind.SPECULATIVE, 1, width=4, draft_depth=3, packed_targets=2, drafts=True)
    rig = Rig(catalog=(*WIDE, tight), known=WIDE, device_allocates=True)
    (request,) = rig.decoding(1, max_tokens=40)
    rig.commit(replace(plan_of(tight, decode_lane(request, 4), duration_ms=5), allocates=True))
    assert row(rig.scheduler.view(rig.now_ns), request).output_left == 40 - 1 - 2


@pytest.mark.parametrize("shape", [ROUND, COPIES, UPKEEP])
def test_only_ragged_programs_that_draft_allocate(shape: GraphShape) -> None:
    rig, (request,) = rig_of()
    with pytest.raises(CommitRefused, match=f"{shape.name} does not allocate its rows"):
        rig.commit(replace(plan_of(shape, decode_lane(request)), allocates=True))


@pytest.mark.parametrize("fixed", [False, True])
def test_nothing_allocates_where_the_host_does(fixed: bool) -> None:
    """Fixed selection keeps whole prefixes, whoever could share out rows."""
    rig = Rig(catalog=WIDE, device_allocates=fixed, keeps_prefixes=fixed)
    (request,) = rig.decoding(1)
    assert not rig.scheduler.view(rig.now_ns).device_allocates
    with pytest.raises(CommitRefused, match="does not allocate its rows"):
        rig.commit(allocated((request, 2)))
