"""What is assumed of rows while frames are on their way."""

from __future__ import annotations

import numpy as np

from flare.graphs.cuda.mirror import Assumed, Mirror
from flare.graphs.frames import Binding, Frame, LaneInput, Sampling
from flare.graphs.programs.frame_results import LaneState
from flare.graphs.programs.rows import ENDED_LENGTH, ENDED_STOP, RUNNING
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence, PageId, RequestHandle

HANDLE = RequestHandle(1, 7)
BINDING = Binding((PageId(0),), Sampling(), (), 6, logprobs=2)
PREFILL, ROUND = GraphShape(GraphKind.PREFILL, 1, 64), rectangular(GraphKind.SPECULATIVE, 1, 4)


def frame(shape: GraphShape, lane: LaneInput) -> Frame:
    """Of one lane."""
    return Frame(Fence(1), shape, (lane,))


def prompt(mirror: Mirror, handle: RequestHandle = HANDLE) -> list[Assumed]:
    """A prompt of ten tokens, bound and on its way."""
    mirror.rows.bind(handle.slot, handle.generation, BINDING)
    return mirror.assume(frame(PREFILL, LaneInput(handle, 0, True, tokens=np.zeros(10, np.int32), binding=BINDING)))


def rounds(mirror: Mirror, width: int) -> list[Assumed]:
    """A round on its way."""
    return mirror.assume(frame(ROUND, LaneInput(HANDLE, 0, True, width=width)))


def standing(mirror: Mirror) -> tuple[int, int, int]:
    """Committed and remaining tokens, and whether the row has ended."""
    rows = mirror.rows
    return int(rows.committed[1]), int(rows.remaining[1]), int(rows.ended[1])


def test_rounds_on_their_way_are_assumed_to_give_all_that_they_may() -> None:
    mirror = Mirror(2, 64)
    assert prompt(mirror) == [Assumed(HANDLE, 1, 2, -1)]
    assert standing(mirror) == (11, 5, RUNNING)
    first, second = rounds(mirror, 4), rounds(mirror, 4)
    assert [lane.tokens for lane in (*first, *second)] == [4, 1]
    assert standing(mirror) == (16, 0, RUNNING)
    mirror.told(first, [1], [LaneState(12, RUNNING, 2, -1)])
    assert standing(mirror) == (16, 0, RUNNING)
    mirror.settle()
    assert standing(mirror) == (13, 3, RUNNING)
    mirror.told(second, [4], [LaneState(16, ENDED_LENGTH, 2, -1)])
    mirror.settle()
    assert standing(mirror) == (16, 0, ENDED_LENGTH)
    assert rounds(mirror, 1) == [Assumed(HANDLE, 0, 2, -1)]


def test_news_of_an_older_generation_is_no_news() -> None:
    mirror = Mirror(2, 64)
    old = prompt(mirror)
    prompt(mirror, RequestHandle(1, 8))
    mirror.told(old, [1], [LaneState(11, ENDED_STOP, 2, -1)])
    mirror.settle()
    assert standing(mirror) == (11, 5, RUNNING)


def test_frames_run_without_rows_that_were_in_a_failed_one() -> None:
    mirror = Mirror(3, 64)
    other = RequestHandle(2, 1)
    prompt(mirror)
    prompt(mirror, other)
    lanes = (LaneInput(HANDLE, 9, True), LaneInput(other, 9, True))
    both = Frame(Fence(2), GraphShape(GraphKind.DECODE, 2), lanes)
    assert mirror.living(both) is both
    mirror.failed(Frame(Fence(1), both.shape, lanes[:1]))
    mirror.settle()
    assert mirror.living(both).lanes == lanes[1:]
    fresh = RequestHandle(1, 8)
    prompt(mirror, fresh)
    again = Frame(Fence(3), both.shape, (LaneInput(fresh, 9, True), lanes[1]))
    assert mirror.living(again) is again
