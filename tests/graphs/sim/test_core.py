"""Virtual time: order, starts, finishes, faults and the rules of the window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flare.graphs.device import DeviceLost
from flare.graphs.frames import Binding, Completion, Frame, LaneInput, Sampling
from flare.graphs.sim.acceptance import FixedAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.state import PageConflict
from flare.graphs.sim.timing import Fault, Faults, by_shape
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence, PageId, RequestHandle

PREFILL = GraphShape(GraphKind.PREFILL, 2, 64)
DECODE = GraphShape(GraphKind.DECODE, 2)
DURATIONS = {PREFILL: 50, DECODE: 10}
HANDLE = RequestHandle(0, 1)


def core_of(faults: Faults | None = None, *, strict: bool = False) -> SimCore:
    """A small device."""
    return SimCore(4, 16, 16, by_shape(DURATIONS), faults=faults, strict=strict)


def prefill(handle: RequestHandle = HANDLE, pages: tuple[int, ...] = (0, 1, 2, 3)) -> LaneInput:
    """A whole prompt of four tokens."""
    binding = Binding(tuple(PageId(page) for page in pages), Sampling(), (), 50)
    return LaneInput(handle, 0, emits=True, tokens=np.arange(4, dtype=np.int32), binding=binding)


def decode(handle: RequestHandle = HANDLE) -> LaneInput:
    """A decode lane."""
    return LaneInput(handle, 4, emits=True)


def frame(fence: int, *lanes: LaneInput) -> Frame:
    """A prefill or a decode frame, as its lanes say."""
    return Frame(Fence(fence), DECODE if lanes[0].tokens is None else PREFILL, lanes)


def run(core: SimCore, fence: int, *lanes: LaneInput) -> Completion:
    """One frame alone."""
    core.submit(frame(fence, *lanes), 0)
    due_ns = core.next_finish_ns()
    assert due_ns is not None
    return core.finish(due_ns)


def test_a_queued_frame_starts_where_the_one_before_ended() -> None:
    core = core_of()
    core.submit(frame(1, prefill()), 1000)
    assert core.next_finish_ns() == 1050
    assert core.finish(1050).device_ns == 50
    core.submit(frame(2, decode()), 2000)
    core.submit(frame(3, decode()), 2003)
    assert core.next_finish_ns() == 2010
    assert core.finish(2015).device_ns == 10
    assert core.next_finish_ns() == 2020
    core.submit(frame(4, decode()), 2019)
    core.finish(2020)
    assert core.next_finish_ns() == 2030
    core.finish(2030)
    assert core.next_finish_ns() is None


def test_a_completion_is_not_taken_before_it_is_due() -> None:
    core = core_of()
    with pytest.raises(ValueError, match="no completion is due"):
        core.finish(0)
    core.submit(frame(1, prefill()), 100)
    with pytest.raises(ValueError, match="no completion is due at 149"):
        core.finish(149)
    assert core.finish(150).fence == 1


def test_results_worked_out_ahead_are_the_same() -> None:
    cores = core_of(), core_of()
    for core in cores:
        core.submit(frame(1, prefill()), 0)
    assert cores[0].run_head() == (0, 50)
    assert cores[0].run_head() == (0, 50)
    assert cores[0].finish(50) == cores[1].finish(50)


def test_the_window_holds_two_decode_frames() -> None:
    core = core_of()
    run(core, 1, prefill())
    core.submit(frame(2, decode()), 0)
    core.submit(frame(3, decode()), 0)
    with pytest.raises(ValueError, match="2 frames are in flight"):
        core.submit(frame(4, decode()), 0)


def test_prefill_needs_an_empty_window() -> None:
    core = core_of()
    run(core, 1, prefill())
    core.submit(frame(2, decode()), 0)
    with pytest.raises(ValueError, match="kind prefill needs an empty window"):
        core.submit(frame(3, prefill(RequestHandle(1, 1), (4,))), 0)
    core.finish(1000)
    core.submit(frame(3, prefill(RequestHandle(1, 1), (4,))), 0)
    with pytest.raises(ValueError, match="kind prefill needs an empty window"):
        core.submit(frame(4, decode()), 0)


def test_fences_rise() -> None:
    core = core_of()
    run(core, 5, prefill())
    with pytest.raises(ValueError, match="fence 5 follows fence 5"):
        core.submit(frame(5, decode()), 0)


def test_a_shape_outside_the_catalog_is_refused() -> None:
    core = core_of()
    core.prepare([PREFILL])
    assert run(core, 1, prefill()).error is None
    assert run(core, 2, decode()).error == "decode/b2 was not prepared"


def test_a_failed_frame_changes_no_row() -> None:
    plain = core_of()
    faulty = core_of(Faults({Fence(2): Fault.FAILED}))
    expected = [run(plain, 1, prefill()), run(plain, 2, decode())]
    first, failed = run(faulty, 1, prefill()), run(faulty, 2, decode())
    assert failed == Completion(Fence(2), 10, (), "frame 2 failed")
    again = run(faulty, 3, decode())
    assert [first.results, again.results] == [completion.results for completion in expected]


def test_an_untimed_frame_has_results_and_no_time() -> None:
    completion = run(core_of(Faults({Fence(1): Fault.UNTIMED})), 1, prefill())
    assert completion.device_ns == 0
    assert completion.error is None
    assert len(completion.results) == 1


def test_a_late_completion_delays_the_ones_behind_but_not_the_device() -> None:
    core = core_of(Faults({Fence(2): Fault.LATE}, late_ns=25))
    run(core, 1, prefill())
    core.submit(frame(2, decode()), 100)
    core.submit(frame(3, decode()), 100)
    assert core.next_finish_ns() == 135
    assert core.finish(135).device_ns == 10
    assert core.next_finish_ns() == 135
    assert core.finish(135).device_ns == 10
    core.submit(frame(4, decode()), 136)
    assert core.next_finish_ns() == 146


def test_two_rounds_may_be_in_flight_and_no_state_operation_beside_them() -> None:
    wide, vision = rectangular(GraphKind.SPECULATIVE, 2, 4), GraphShape(GraphKind.VISION, 1)
    core = SimCore(4, 16, 16, by_shape({**DURATIONS, wide: 12, vision: 5}), acceptance=FixedAcceptance(2))
    run(core, 1, prefill())
    core.submit(Frame(Fence(2), wide, (replace(decode(), width=4),)), 0)
    core.submit(frame(3, decode()), 0)
    assert [core.finish(1000).results[0].committed for _ in range(2)] == [8, 9]
    core.submit(frame(4, decode()), 1000)
    with pytest.raises(ValueError, match="kind vision needs an empty window"):
        core.submit(Frame(Fence(5), vision, (decode(),)), 1000)


def test_a_malformed_completion_counts_one_too_many() -> None:
    core = core_of(Faults({Fence(2): Fault.MALFORMED}))
    run(core, 1, prefill())
    assert [result.committed for result in run(core, 2, decode()).results] == [7]
    assert [result.committed for result in run(core, 3, decode()).results] == [7]


def test_a_lost_device_fails_what_is_in_flight_and_takes_no_more() -> None:
    core = core_of(Faults({Fence(2): Fault.LOST}))
    run(core, 1, prefill())
    core.submit(frame(2, decode()), 0)
    core.submit(frame(3, decode()), 0)
    assert [core.finish(1000).error for _ in range(2)] == ["the device died in frame 2"] * 2
    with pytest.raises(DeviceLost, match="died in frame 2"):
        core.submit(frame(4, decode()), 2000)


def test_a_strict_device_raises_when_a_page_has_two_rows() -> None:
    for strict in (True, False):
        core = core_of(strict=strict)
        run(core, 1, prefill())
        run(core, 2, prefill(RequestHandle(1, 1), (3, 4)))
        if strict:
            with pytest.raises(PageConflict):
                run(core, 3, decode())
        else:
            assert "lost a page" in (run(core, 3, decode()).error or "")
