"""Stages before inference, through the scheduler: their order, what the device is told, and who is charged."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import CancelRequest, Dispatch, Effect, RequestLost, SubmitFrame, WindowMoved
from flare.machines.execution import Request
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import StateRow
from flare.machines.lifecycle import RequestState
from flare.machines.request import ImageWindow
from flare.machines.selection.select import select
from flare.machines.selection.view import Phase, Plan
from flare.machines.slot import StageWork

from .rig import (
    INITIALIZE,
    MS,
    RESTORE,
    RESUME,
    RETIRE,
    SNAPSHOT,
    STAGED,
    VISION,
    Rig,
    decode,
    plan_of,
    prefill,
    stage,
    stage_lane,
)
from .test_accounting import close, token_price
from .test_snapshot import row

SHAPES = {shape.kind: shape for shape in STAGED}
IMAGES = (ImageWindow(2, 5, 2), ImageWindow(6, 9, 1))


def commit(rig: Rig, plan: Plan) -> Dispatch:
    """The only lane that a commit submits."""
    effects = rig.scheduler.commit(plan, rig.scheduler.board(rig.now_ns), rig.now_ns)
    rig.scheduler.check()
    (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
    (dispatch,) = submit.lanes
    return dispatch


def go_on(rig: Rig, request: Request) -> tuple[str, Dispatch, list[Effect]]:
    """The next thing that a lone request needs: its kind, its lane, and what came of it."""
    if request.stages:
        plan = stage(SHAPES[request.stages[0]], request)
    elif request.prefills:
        plan = prefill(request, request.boundary() - request.position)
    else:
        plan = decode(request)
    dispatch = commit(rig, plan)
    return plan.shape.kind.value, dispatch, rig.complete(after_ms=4)


def test_a_prompt_with_two_windows_and_checkpoints() -> None:
    """Every stage in its place, what each frame carries, and one fresh generation between the windows."""
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(12, 2, initialize=True, restored_tokens=1, windows=IMAGES, checkpoints=(4, 6, 12))
    pages = request.pages
    assert row(rig.scheduler.view(rig.now_ns), request).stages == (GraphKind.INITIALIZE, GraphKind.RESTORE)
    seen, windows = [], []
    while request.state in (RequestState.PREPARING, RequestState.PREFILLING):
        kind, dispatch, effects = go_on(rig, request)
        seen.append((kind, dispatch.work.start, dispatch.work.generation, dispatch.stage))
        assert dispatch.pages == (pages if len(seen) == 1 or (kind == "restore" and dispatch.work.start) else None)
        windows += [effect.after for effect in effects if isinstance(effect, WindowMoved)]
    assert seen == [
        ("initialize", 0, 1, StageWork()),
        ("restore", 0, 1, StageWork(restored_tokens=1)),
        ("prefill", 1, 1, None),
        ("vision", 2, 1, StageWork(operation=0)),
        ("vision", 2, 1, StageWork(operation=1)),
        ("prefill", 2, 1, None),
        ("snapshot", 4, 1, StageWork(StateRow(0))),
        ("prefill", 4, 1, None),
        ("snapshot", 6, 1, StageWork(StateRow(0))),
        ("restore", 6, 2, StageWork(StateRow(0))),
        ("vision", 6, 2, StageWork(operation=0)),
        ("prefill", 6, 2, None),
        ("snapshot", 12, 2, StageWork(StateRow(0))),
    ]
    assert windows == [
        *("filling", "filling", "active", "draining", "snapshotting", "restoring", "filling", "active", "done")
    ]
    assert (request.state, request.consumed, request.produced) == (RequestState.DECODING, 12, 1)
    assert request.pages == pages


def test_rows_say_what_is_still_to_do_here() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(12, 2, windows=IMAGES, spans=((2, 5), (7, 9)))
    rows = []
    while request.state in (RequestState.PREPARING, RequestState.PREFILLING):
        seen = row(rig.scheduler.view(rig.now_ns), request)
        rows.append((seen.position, seen.boundary, seen.spans, [kind.value for kind in seen.stages]))
        go_on(rig, request)
    both, second = ((2, 5), (7, 9)), ((7, 9),)
    assert rows == [
        (0, 2, both, []),
        (2, 6, both, ["vision", "vision"]),
        (2, 6, both, ["vision"]),
        (2, 6, both, []),
        (6, 12, second, ["snapshot", "restore", "vision"]),
        (6, 12, second, ["restore", "vision"]),
        (6, 12, second, ["vision"]),
        (6, 12, second, []),
    ]


def test_a_window_of_the_restored_prefix_needs_nothing() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(12, 2, restored_tokens=6, windows=IMAGES, checkpoints=(5,))
    assert (request.stages, request.state_row) == ((GraphKind.RESTORE, GraphKind.VISION), None)
    assert [go_on(rig, request)[0] for _ in range(3)] == ["restore", "vision", "prefill"]


def test_stages_earn_no_tokens_and_all_participants_are_charged() -> None:
    """Restored tokens are no service; who waits beside pays as in any other frame."""
    rig = Rig(catalog=STAGED)
    request, other = rig.arrive(8, 2, restored_tokens=4), rig.arrive(8, 2)
    rig.run(prefill(other, 4))
    prices = [token_price(request), token_price(other)]
    rig.commit(stage(RESTORE, request))
    rig.complete(after_ms=4)
    for before, after in zip(prices, (token_price(request), token_price(other)), strict=True):
        assert after == close(before * 2.718281828459045 ** (4 / 100))
    assert request.consumed == 4
    assert rig.scheduler.waiting.service("a") == 4


def test_a_checkpoint_at_the_end_blocks_decoding() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(8, 3, checkpoints=(8,))
    rig.run(prefill(request, 8))
    seen = row(rig.scheduler.view(rig.now_ns), request)
    assert (seen.phase, seen.stages, request.state) == (Phase.DECODE, (GraphKind.SNAPSHOT,), RequestState.PREPARING)
    with pytest.raises(CommitRefused, match="slot 0 stands before snapshot"):
        rig.commit(decode(request))
    rig.run(stage(SNAPSHOT, request))
    assert request.state is RequestState.DECODING
    rig.run(decode(request))


def test_an_output_that_ends_with_its_prompt_needs_no_checkpoint() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(8, 1, checkpoints=(8,))
    rig.run(prefill(request, 8))
    assert request.state is RequestState.RETIRING
    assert row(rig.scheduler.view(rig.now_ns), request).stages == ()


def test_what_two_requests_need_goes_into_one_frame() -> None:
    rig = Rig(catalog=STAGED)
    first, second = (rig.arrive(8, 2, initialize=True) for _ in range(2))
    rig.run(stage(INITIALIZE, first, second))
    assert {first.state, second.state} == {RequestState.PREFILLING}


@pytest.mark.parametrize("shape", [RESTORE, VISION, SNAPSHOT, RETIRE, RESUME])
def test_a_stage_out_of_turn_is_refused(shape: GraphShape) -> None:
    rig = Rig(catalog=STAGED)
    request = rig.arrive(8, 2, initialize=True, restored_tokens=2)
    with pytest.raises(
        CommitRefused, match=f"slot 0 does not stand before {shape.kind.value}: its stage is initialize"
    ):
        rig.commit(stage(shape, request))
    with pytest.raises(CommitRefused, match="slot 0 stands before initialize"):
        rig.commit(prefill(request, 8))


def test_a_stage_that_would_move_tokens_is_refused() -> None:
    rig = Rig(catalog=STAGED)
    request = rig.arrive(8, 2, restored_tokens=2)
    work = stage_lane(request)
    for wrong in (replace(work, start=0), replace(work, tokens=2), replace(work, emits=True)):
        with pytest.raises(CommitRefused, match="a stage gives no tokens"):
            rig.commit(plan_of(RESTORE, wrong))
    (ready,) = rig.decoding(1)
    with pytest.raises(CommitRefused, match="slot 1 does not stand before restore: its stage is none"):
        rig.commit(stage(RESTORE, ready))


def test_a_chunk_may_not_end_inside_a_span() -> None:
    rig = Rig(catalog=STAGED)
    request = rig.arrive(12, 2, spans=((3, 7),))
    for tokens in (4, 6):
        with pytest.raises(CommitRefused, match=f"may not stop at prompt token {tokens}, inside an atomic span"):
            rig.commit(prefill(request, tokens))
    rig.run(prefill(request, 3))
    rig.run(prefill(request, 4))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_restore_that_says_otherwise_is_malformed(tokens: int) -> None:
    rig = Rig(catalog=STAGED)
    request = rig.arrive(8, 2, restored_tokens=4)
    rig.commit(stage(RESTORE, request))
    commit_ = rig.scheduler.in_flight[0].commit
    assert commit_ is not None
    record = rig.record(commit_.plan.lanes[0])
    effects = rig.complete(type(record)(record.handle, tokens, None))
    (lost,) = [effect for effect in effects if isinstance(effect, RequestLost)]
    assert lost.error == f"malformed completion: slot 0 stands at {tokens} tokens instead of 4"


def test_a_failed_stage_ends_its_requests() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(12, 2, windows=IMAGES[1:], checkpoints=(3,))
    rig.run(prefill(request, 3))
    rig.commit(stage(SNAPSHOT, request))
    effects = rig.complete(error="broken")
    assert [effect.request for effect in effects if isinstance(effect, RequestLost)] == [request.id]
    assert rig.scheduler.state_rows.free == 1 and rig.scheduler.idle


def test_a_state_row_is_fenced_with_its_request() -> None:
    """Cancelled while its snapshot is written: the row is free after that frame, and the next in line gets it."""
    rig = Rig(catalog=STAGED, state_rows=1)
    request = rig.arrive(12, 2, checkpoints=(3,))
    waiting = rig.arrive(12, 2, checkpoints=(3,))
    assert waiting.state is RequestState.QUEUED
    rig.run(prefill(request, 3))
    rig.commit(stage(SNAPSHOT, request))
    rig.scheduler.apply(CancelRequest(request.id), rig.now_ns)
    assert (rig.scheduler.state_rows.free, waiting.state) == (0, RequestState.QUEUED)
    rig.complete(after_ms=4)
    assert (waiting.state, waiting.state_row) == (RequestState.PREFILLING, StateRow(0))


def test_who_waits_for_a_state_row_is_not_overtaken() -> None:
    rig = Rig(catalog=STAGED, state_rows=1)
    rig.arrive(12, 2, checkpoints=(3,))
    second, third = rig.arrive(12, 2, checkpoints=(3,)), rig.arrive(12, 2)
    assert {second.state, third.state} == {RequestState.QUEUED}


def test_the_selector_takes_a_lone_request_through_its_stages() -> None:
    """From arrival to retirement, by `select` alone, with nothing measured before."""
    rig = Rig(catalog=STAGED, known=(), state_rows=1)
    rig.arrive(12, 2, initialize=True, restored_tokens=1, windows=IMAGES, checkpoints=(4,))
    kinds = []
    while not rig.scheduler.idle:
        plan = select(rig.scheduler.view(rig.now_ns)).plan
        assert plan is not None
        kinds.append(plan.shape.kind.value)
        rig.commit(plan)
        rig.complete(after_ms=4, device_ms=4)
        rig.now_ns += MS
    assert kinds[:5] == ["initialize", "restore", "prefill", "vision", "vision"]
    assert kinds[-2:] == ["decode", "terminal_snapshot"]
    assert kinds.count("snapshot") == 2 and kinds.count("vision") == 3
