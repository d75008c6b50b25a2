"""What is refused of a frame before it is written, and what buffers take."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from flare.graphs.frames import Binding, Frame, History, LaneInput, Sampling, StageInput
from flare.graphs.programs.buffers import StepBuffers
from flare.graphs.programs.extents import Extents, extents_of
from flare.graphs.programs.frame_io import FrameIo
from flare.graphs.programs.rows import StateRows
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import Fence, PageId, RequestHandle

VOCAB = 300
NONE = np.zeros(0, np.int32)


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Token ids or counts."""
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("history", "named"),
    [
        (History(ids(VOCAB), ids(1)), "token_ids"),
        (History(ids(-1, 2), ids(1, 1)), "token_ids"),
        (History(ids(1, 2), ids(1)), "counts"),
        (History(np.arange(65, dtype=np.int32), np.zeros(65, np.int32)), "more than a context holds"),
        (History(NONE, NONE, banned=(VOCAB,)), "banned"),
        (History(NONE, NONE, banned=(-1,)), "banned"),
        (History(NONE, NONE, banned=(1,) * 129), "banned"),
    ],
)
def test_a_history_that_would_index_beyond_the_logits_is_refused(history: History, named: str) -> None:
    io = FrameIo(StateRows.allocate(1, 64), StepBuffers.allocate(Extents(1, 1, 4), 64), pages=2, vocab=VOCAB)
    binding = Binding((PageId(0),), Sampling(), (), 5)
    lane = LaneInput(RequestHandle(0, 1), 0, True, ids(1, 2), None, binding, history)
    with pytest.raises(ValueError, match=named):
        io.check(Frame(Fence(1), GraphShape(GraphKind.PREFILL, 1, 4), (lane,)))


def test_a_binding_reaches_every_column_of_its_row() -> None:
    rows = StateRows.allocate(2, 64)
    sampling = Sampling(0.5, 4, 0.25, 0.125, 2**63 - 1, ((7, 1.5), (9, -2.0)), 0.75, 1.25, 2.0)
    rows.bind(1, 6, Binding((PageId(3), PageId(1)), sampling, (8, 5), 11, 2, 0))
    expected: dict[str, object] = {
        "generation": 6, "committed": 0, "remaining": 11, "ended": 0, "page_count": 2, "page_table": [3, 1],
        "stop_count": 2, "stop_tokens": [8, 5], "temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125,
        "seed": 2**63 - 1, "presence": 0.75, "frequency": 1.25, "repetition": 2.0, "bias_count": 2,
        "bias_tokens": [7, 9], "bias_values": [1.5, -2.0], "logprobs": 2, "prompt_logprobs": 0, "pending": -1,
        "drafted": 0, "waiting": 0,
    }  # fmt: skip
    assert {*expected, "waiting_tokens", "waiting_hidden"} == {field.name for field in fields(rows)}
    for name, value in expected.items():
        column: torch.Tensor = getattr(rows, name)[1]
        assert (column[:2].tolist() if isinstance(value, list) else column.item()) == value, name
    rows.bind(1, 7, Binding((PageId(0),), Sampling(), (), 1))
    assert (int(rows.stop_count[1]), int(rows.bias_count[1]), int(rows.logprobs[1])) == (0, 0, -1)


def test_bytes_for_says_what_allocate_takes() -> None:
    made = StepBuffers.allocate(Extents(3, 2, 50), 64)
    assert StepBuffers.bytes_for(Extents(3, 2, 50), 64) == sum(
        getattr(made, field.name).nbytes for field in fields(made)
    )


MIXED = GraphShape(GraphKind.MIXED, 4, 64, prompt_rows=1)
WIDE = GraphShape(GraphKind.MIXED, 4, 64, prompt_rows=2)
DECODE = GraphShape(GraphKind.DECODE, 4)
PREFILL = GraphShape(GraphKind.PREFILL, 2, 64)


@pytest.fixture
def served() -> tuple[FrameIo, StateRows, StepBuffers]:
    """Slots 0 and 1 decode, slot 2 stands at 10 of its prompt, slot 3 is nobody's; frames of up to WIDE."""
    rows, buffers = StateRows.allocate(5, 128), StepBuffers.allocate(extents_of([WIDE, DECODE, PREFILL]), 128)
    for slot in range(3):
        rows.bind(slot, 1, Binding((PageId(2 * slot), PageId(2 * slot + 1)), Sampling(), (), 9))
        rows.committed[slot] = 10 + (slot < 2)
    rows.pending[:2] = 7
    return FrameIo(rows, buffers, pages=8, vocab=VOCAB), rows, buffers


def pending(slot: int, width: int = 1) -> LaneInput:
    """A lane that decodes."""
    return LaneInput(RequestHandle(slot, 1), 10, True, width=width)


def chunk(slot: int, tokens: int, start: int = 10, *, fresh: bool = False) -> LaneInput:
    """A lane that consumes prompt tokens."""
    binding = Binding((PageId(6), PageId(7)), Sampling(), (), 9) if fresh else None
    return LaneInput(RequestHandle(slot, 1), start, False, np.arange(tokens, dtype=np.int32), 5, binding)


REFUSED: dict[str, tuple[GraphShape, list[LaneInput], str]] = {
    "two prompts": (MIXED, [chunk(2, 5), chunk(3, 5, 0, fresh=True)], "2 prompts for the 1 prompt rows"),
    "too many tokens": (WIDE, [chunk(2, 40), chunk(3, 40, 0, fresh=True)], "80 tokens for the 64"),
    "too many rows": (MIXED, [pending(0), pending(1), chunk(2, 5), pending(0), pending(1)], "5 lanes for the 4 rows"),
    "a row twice": (MIXED, [pending(0), pending(0)], "same slot"),
    "a slot beyond": (MIXED, [pending(5)], "slot is outside"),
    "decoding inside a prompt": (MIXED, [pending(0), pending(2)], "no token is pending"),
    "decoding at once": (MIXED, [chunk(2, 5), replace(pending(3), binding=Binding((), Sampling(), (), 9))], "pending"),
    "a prompt after its end": (MIXED, [chunk(0, 5, 11)], "prompt that is complete"),
    "a gap": (MIXED, [chunk(2, 5, 12)], "start is 12"),
    "a fresh row inside its prompt": (MIXED, [chunk(3, 5, 4, fresh=True)], "start is 4"),
    "an empty prompt": (MIXED, [chunk(2, 0)], "must not be empty"),
    "two targets": (MIXED, [pending(0, width=2), chunk(2, 5)], "width is 2"),
    "no room in its pages": (MIXED, [pending(0), chunk(2, 60)], "70 are needed"),
    "a decoding row in a prefill": (PREFILL, [chunk(2, 5), pending(0)], "tokens are expected"),
    "a prompt in a decode": (DECODE, [pending(0), chunk(2, 5)], "tokens are not expected"),
    "a stage": (MIXED, [replace(pending(0), stage=StageInput())], "stage"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_frame_is_refused_and_leaves_no_trace(
    served: tuple[FrameIo, StateRows, StepBuffers], name: str
) -> None:
    io, rows, _ = served
    before = {field.name: getattr(rows, field.name).clone() for field in fields(rows)}
    shape, lanes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        io.check(Frame(Fence(1), shape, tuple(lanes)))
    assert all(torch.equal(getattr(rows, name), value) for name, value in before.items())


def test_packed_offsets_are_sums_of_query_lengths_whatever_the_slots(
    served: tuple[FrameIo, StateRows, StepBuffers],
) -> None:
    io, _, buffers = served
    frame = Frame(Fence(1), WIDE, (pending(1), chunk(3, 6, 0, fresh=True), pending(0), chunk(2, 4)))
    io.check(frame)
    io.write(frame)
    assert buffers.slot[:4].tolist() == [1, 3, 0, 2]
    assert buffers.rows[:4].tolist() == [1, 6, 1, 4]
    assert buffers.prefill_row.tolist() == [1, 3]
    assert buffers.tokens[1:7].tolist() == [0, 1, 2, 3, 4, 5]
    assert buffers.tokens[8:12].tolist() == [0, 1, 2, 3]
    assert buffers.targets[[6, 11]].tolist() == [5, 5]
    alone = Frame(Fence(2), MIXED, (pending(1), pending(0)))
    io.check(alone)
    io.write(alone)
    assert buffers.prefill_row.tolist() == [-1, -1]


def test_a_single_prompt_row_is_named_by_one_number() -> None:
    buffers = StepBuffers.allocate(extents_of([MIXED, DECODE]), 128)
    assert (buffers.prefill_row.dtype, buffers.prefill_row.tolist()) == (torch.int32, [-1])
    assert len(buffers.tokens) == 64 + 3
