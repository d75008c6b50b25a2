"""Blocks, and how little of them a frame takes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from flare.graphs.cuda.binds import FrameScalars
from flare.graphs.cuda.mirror import Mirror
from flare.graphs.cuda.seats import Seat
from flare.graphs.cuda.staging import Inputs, Layout, Outputs, Records
from flare.graphs.frames import Binding, Frame, History, LaneInput, Sampling
from flare.graphs.programs.buffers import StepBuffers
from flare.graphs.programs.extents import Extents
from flare.graphs.programs.rows import StateRows
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence, PageId, RequestHandle
from tests.graphs.cuda.fake_runtime import FakeRuntime

LARGE = Extents(lanes=64, prompts=8, rows=2048 + 63 * 8, width=8)
ONE = np.ones(1, np.int32)


def layout(extents: Extents = LARGE, context: int = 8192) -> Layout:
    """Of a large server."""
    return Layout(extents, max_model_len=context, history=context, slots=65, draft_vocab=100)


def tensors(records: Records) -> dict[str, torch.Tensor]:
    """All of them by name."""
    parts: dict[str, StepBuffers | StateRows | FrameScalars] = {
        "": records.buffers,
        "bind.": records.binds.rows,
        "scalar.": records.scalars,
    }
    found = {prefix + f.name: getattr(part, f.name) for prefix, part in parts.items() for f in fields(part)}
    return {**found, "bind.slot": records.binds.slot}


def test_both_sides_are_the_same_views_of_their_blocks() -> None:
    made = layout(Extents(4, 2, 40, 3), 64)
    blocks = [(torch.zeros(made.input_bytes, dtype=torch.uint8), torch.zeros(made.output_bytes, dtype=torch.uint8))] * 2
    host, card = (made.records(*pair, on_card=on_card) for pair, on_card in zip(blocks, (False, True), strict=True))
    expected = StepBuffers.allocate(made.extents, 64, 65, 100)
    for name, tensor in tensors(card).items():
        if name == "draft_probabilities":
            assert tensor.shape == expected.draft_probabilities.shape
            continue
        twin = tensors(host)[name]
        assert (twin.shape, twin.dtype, twin.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        if name in {f.name for f in fields(StepBuffers)}:
            assert (tensor.shape, tensor.dtype) == (getattr(expected, name).shape, getattr(expected, name).dtype)


def test_no_two_views_overlap() -> None:
    made = layout(Extents(4, 2, 40, 3), 64)
    inputs, outputs = (torch.zeros(size, dtype=torch.uint8) for size in (made.input_bytes, made.output_bytes))
    views = tensors(made.records(inputs, outputs, on_card=False))
    for number, view in enumerate(views.values(), start=1):
        view.fill_(number)
    assert all(bool((view == number).all()) for number, view in enumerate(views.values(), start=1))


def test_parts_follow_one_another_to_the_ends_of_the_blocks() -> None:
    made = layout()
    sent = [made.inputs_to(part, 64 if part is Inputs.HISTORY else 0) for part in Inputs]
    fetched = [made.outputs_to(part) for part in Outputs]
    assert sent == sorted(sent) and sent[-1] == made.input_bytes
    assert fetched == sorted(fetched) and fetched[-1] == made.output_bytes


HANDLE = RequestHandle(3, 1)
DECODE, COPIES = GraphShape(GraphKind.DECODE, 64), rectangular(GraphKind.SPECULATIVE, 8, 4)
PROMPT = GraphShape(GraphKind.PREFILL, 8, 2048)
FRESH = Binding((PageId(0),), Sampling(), (), 5)
PENALTY = History(ONE, ONE)
BAN = History(np.zeros(0, np.int32), np.zeros(0, np.int32), banned=(3,))


@pytest.mark.parametrize(
    ("shape", "lane", "most"),
    [
        (DECODE, LaneInput(HANDLE, 9, True), 3_000),
        (COPIES, LaneInput(HANDLE, 9, True), 3_000),
        (PROMPT, LaneInput(HANDLE, 64, True, tokens=ONE), 24_000),
        (PROMPT, LaneInput(HANDLE, 0, True, tokens=ONE, binding=FRESH), 110_000),
        (DECODE, LaneInput(HANDLE, 9, True, history=BAN), 150_000),
        (DECODE, LaneInput(HANDLE, 9, True, history=PENALTY), 220_000),
    ],
    ids=["decode", "round", "chunk", "binding", "ban", "penalty"],
)
def test_a_frame_sends_no_more_than_it_needs(shape: GraphShape, lane: LaneInput, most: int) -> None:
    runtime, made = FakeRuntime(), layout()
    seat = Seat(runtime, made, Mirror(64, 8192), pages=1000, vocab=100)
    sent = seat.write(Frame(Fence(1), shape, (lane,)))
    assert most / 2 < sent < most < made.input_bytes / 10
    assert made.outputs_to(Outputs.TOKENS) < 12_000
    runtime.close()
