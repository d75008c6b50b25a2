"""What a simulated device refuses, and that a refused frame leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flare.graphs.frames import Binding, Frame, History, LaneInput, Sampling
from flare.graphs.sim.rows import SimRows
from flare.graphs.sim.state import FrameRefused, PageConflict
from flare.graphs.sim.tokens import TokenSource
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle
from flare.machines.request import EndReason

PREFILL = GraphShape(GraphKind.PREFILL, 2, 40)
SCORED = GraphShape(GraphKind.SCORED_PREFILL, 2, 40)
DECODE = GraphShape(GraphKind.DECODE, 2)
PENALTY = Sampling(presence_penalty=1.0)


def handle(slot: int, generation: int = 1) -> RequestHandle:
    """A handle of generation 1 unless said."""
    return RequestHandle(slot, generation)


def binding(*pages: int, sampling: Sampling | None = None, output_limit: int = 10) -> Binding:
    """A binding with pages of 16 tokens."""
    return Binding(tuple(PageId(page) for page in pages), sampling or Sampling(), (), output_limit)


def prompt(slot: int, bound: Binding | None, *, start: int = 0, count: int = 5, emits: bool = True) -> LaneInput:
    """A chunk of a prompt whose token at each position is the position."""
    tokens = np.arange(start, start + count, dtype=np.int32)
    return LaneInput(handle(slot), start, emits, tokens, None if emits else start + count, bound)


def decode(slot: int, generation: int = 1) -> LaneInput:
    """A decode lane."""
    return LaneInput(handle(slot, generation), 0, emits=True)


def frame(shape: GraphShape, *lanes: LaneInput) -> Frame:
    """A frame; fences do not matter here."""
    return Frame(Fence(1), shape, lanes)


def rows_of(alphabet: range = range(256)) -> SimRows:
    """Four slots, eight pages."""
    return SimRows(4, 8, 16, TokenSource(alphabet))


def standing() -> SimRows:
    """Slot 0 decodes, slot 1 is in its prompt at 5, the others are free."""
    rows = rows_of()
    rows.run(frame(PREFILL, prompt(0, binding(0)), prompt(1, binding(1, 2), emits=False)))
    return rows


REFUSALS = {
    "no lanes": (frame(DECODE), "0 lanes"),
    "too many lanes": (frame(DECODE, decode(0), decode(1), decode(2)), "3 lanes"),
    "a slot twice": (frame(DECODE, decode(0), decode(0)), "two lanes"),
    "a slot too high": (frame(DECODE, decode(4)), "slot 4 of 4"),
    "an unbound slot": (frame(DECODE, decode(2)), "stale handle: slot 2 generation 1, but the slot is unbound"),
    "an old generation": (frame(DECODE, decode(0, 0)), "stale handle: slot 0 generation 0.*at generation 1"),
    "a generation bound twice": (frame(PREFILL, prompt(0, binding(3))), "bound with 1"),
    "a chunk too large": (frame(PREFILL, prompt(2, binding(3, 4, 5), count=41)), "41 prompt tokens"),
    "a page that is not there": (frame(PREFILL, prompt(2, binding(8))), "page 8 of 8"),
    "too few pages": (frame(PREFILL, prompt(2, binding(3), count=17)), "its pages hold 16 tokens"),
    "a prompt from elsewhere": (frame(PREFILL, prompt(1, None, start=6)), "from 6, but the row stands at 5"),
    "a fresh row from elsewhere": (frame(PREFILL, prompt(2, binding(3), start=4)), "from 4, .* stands at 0"),
    "a prompt after its end": (frame(PREFILL, prompt(0, None, start=5)), "whose prompt is complete"),
    "a prompt without tokens": (frame(PREFILL, decode(1)), "without tokens"),
    "an empty chunk": (frame(PREFILL, prompt(1, None, start=5, count=0)), "without tokens"),
    "a decode inside the prompt": (frame(DECODE, decode(1)), "before its prompt is complete"),
    "a decode with tokens": (frame(DECODE, prompt(0, None, count=0)), "with prompt tokens"),
    "a target beyond the end": (
        frame(PREFILL, replace(prompt(1, None, start=5), target=3)),
        "names a target beyond",
    ),
    "scores not asked for": (frame(SCORED, prompt(1, None, start=5)), "asks for no prompt log-probabilities"),
    "no output allowed": (frame(PREFILL, prompt(2, binding(3, output_limit=0))), "may produce 0 tokens"),
    "penalties without history": (frame(PREFILL, prompt(2, binding(3, sampling=PENALTY))), "has penalties"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_lane_leaves_no_trace(case: str) -> None:
    bad, message = REFUSALS[case]
    rows, untouched = standing(), standing()
    with pytest.raises(FrameRefused, match=message):
        rows.run(bad)
    after = [frame(DECODE, decode(0)), frame(PREFILL, prompt(1, None, start=5)), frame(PREFILL, prompt(3, binding(6)))]
    assert [rows.run(each) for each in after] == [untouched.run(each) for each in after]


def test_a_good_lane_does_not_run_beside_a_bad_one() -> None:
    rows, untouched = standing(), standing()
    with pytest.raises(FrameRefused):
        rows.run(frame(DECODE, decode(0), decode(1)))
    with pytest.raises(FrameRefused):
        rows.run(frame(PREFILL, prompt(2, binding(3)), prompt(1, None, start=7)))
    after = [frame(DECODE, decode(0)), frame(PREFILL, prompt(2, binding(3)))]
    assert [rows.run(each) for each in after] == [untouched.run(each) for each in after]


def test_a_page_given_to_another_row_may_be_used_by_it_alone() -> None:
    rows = standing()
    rows.run(frame(PREFILL, prompt(2, binding(0))))
    with pytest.raises(PageConflict, match=r"slot=0.* lost a page to .*slot=2"):
        rows.run(frame(DECODE, decode(0), decode(2)))
    rows.run(frame(DECODE, decode(2)))


def test_a_page_may_not_be_taken_from_a_row_of_the_same_frame() -> None:
    rows = standing()
    with pytest.raises(PageConflict, match="page 3 bound to"):
        rows.run(frame(PREFILL, prompt(2, binding(3)), prompt(3, binding(3))))
    with pytest.raises(PageConflict, match="is served as"):
        rows.run(frame(PREFILL, prompt(1, None, start=5), prompt(2, binding(1))))
    with pytest.raises(PageConflict, match="page 3 bound to"):
        rows.run(frame(PREFILL, prompt(2, binding(3, 3))))
    assert rows.run(frame(PREFILL, prompt(1, None, start=5)))


def test_pages_of_an_ended_or_replaced_row_are_free() -> None:
    rows = rows_of()
    rows.run(frame(PREFILL, prompt(0, binding(0, output_limit=1)), prompt(1, binding(1))))
    rows.run(frame(PREFILL, prompt(2, binding(0))))
    (ended,) = rows.run(frame(DECODE, decode(0)))
    assert ended.tokens == ()
    rows.run(frame(PREFILL, replace(prompt(1, binding(2)), handle=handle(1, 2))))
    rows.run(frame(PREFILL, prompt(3, binding(1))))
    assert all(result.tokens for result in rows.run(frame(DECODE, decode(1, 2), decode(3))))


def test_the_last_token_needs_no_room() -> None:
    rows = rows_of()
    rows.run(frame(PREFILL, prompt(0, binding(0, output_limit=12))))
    for _ in range(10):
        rows.run(frame(DECODE, decode(0)))
    (last,) = rows.run(frame(DECODE, decode(0)))
    assert last.committed == 17
    assert last.ended is EndReason.LENGTH


def test_a_row_may_not_decode_beyond_its_pages() -> None:
    rows = rows_of()
    rows.run(frame(PREFILL, prompt(0, binding(0, output_limit=100), count=16)))
    with pytest.raises(FrameRefused, match="would write position 16; its pages hold 16"):
        rows.run(frame(DECODE, decode(0)))


def test_history_must_count_every_output() -> None:
    rows = rows_of()
    empty, one = (History(np.array([7], np.int32), np.array([count], np.int32)) for count in (0, 1))
    first = replace(prompt(0, binding(0, sampling=PENALTY)), history=empty)
    rows.run(frame(PREFILL, first))
    with pytest.raises(FrameRefused, match="1 outputs; its history does not say so"):
        rows.run(frame(DECODE, replace(decode(0), history=empty)))
    assert rows.run(frame(DECODE, replace(decode(0), history=one)))


def test_a_row_without_an_allowed_token_is_refused() -> None:
    rows = rows_of(range(3))
    none = History(np.zeros(0, np.int32), np.zeros(0, np.int32), banned=(0, 2))
    forbidding = Sampling(logit_bias=((1, -100.0),))
    with pytest.raises(FrameRefused, match="every token is forbidden"):
        rows.run(frame(PREFILL, replace(prompt(0, binding(0, sampling=forbidding)), history=none)))


def test_a_scored_prompt_without_output_cannot_decode() -> None:
    rows = rows_of()
    bound = replace(binding(0, output_limit=0), prompt_logprobs=1)
    (result,) = rows.run(frame(SCORED, replace(prompt(0, bound), emits=False)))
    assert result.prompt_scores is not None
    assert len(result.prompt_scores) == 4
    with pytest.raises(FrameRefused, match="no pending token"):
        rows.run(frame(DECODE, decode(0)))
