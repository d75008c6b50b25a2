"""What is refused of a frame before it is written, and what buffers take."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from flare.graphs.frames import Binding, Frame, History, LaneInput, Sampling
from flare.graphs.programs.buffers import StepBuffers
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
    io = FrameIo(StateRows.allocate(1, 64), StepBuffers.allocate(1, 4, 64), pages=2, vocab=VOCAB)
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
        "bias_tokens": [7, 9], "bias_values": [1.5, -2.0], "logprobs": 2, "prompt_logprobs": 0, "pending": 0,
    }  # fmt: skip
    assert set(expected) == {field.name for field in fields(rows)}
    for name, value in expected.items():
        column: torch.Tensor = getattr(rows, name)[1]
        assert (column[:2].tolist() if isinstance(value, list) else column.item()) == value, name
    rows.bind(1, 7, Binding((PageId(0),), Sampling(), (), 1))
    assert (int(rows.stop_count[1]), int(rows.bias_count[1]), int(rows.logprobs[1])) == (0, 0, -1)


def test_bytes_for_says_what_allocate_takes() -> None:
    made = StepBuffers.allocate(3, 50, 64)
    assert StepBuffers.bytes_for(3, 50, 64) == sum(getattr(made, field.name).nbytes for field in fields(made))
