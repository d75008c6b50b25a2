"""The step of a card against the torch program, frame by frame."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from flare.graphs.cuda.forward import Forward
from flare.graphs.cuda.pages import CudaPages
from flare.graphs.cuda.plain_attention import PlainAttention
from flare.graphs.cuda.spans import Packing
from flare.graphs.frames import History, LaneInput, LaneResult, Sampling
from flare.graphs.memory.pages import KvPages
from flare.graphs.programs.decoder import Decoder, Span
from flare.graphs.programs.frame_io import FrameIo
from flare.machines.graph import GraphKind, GraphShape, rectangular
from tests.graphs.cuda.step_program import ADVANCES, CudaProgram
from tests.graphs.cuda.twins import PROMPT_ROWS, SLOTS, WIDTH, Crowd, Twins
from tests.graphs.drafts import first_layers
from tests.graphs.exact_rounds import CONFIG, DRAFTS, SOURCE
from tests.graphs.programs_driver import Driver, Tensors
from tests.tiny_models import tiny_config, tiny_tensors

CONFIGS = {
    "llama": CONFIG,
    "tied": tiny_config(tie_embeddings=True),
    "biased": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "window": tiny_config(sliding_window=40),
    "qwen2": tiny_config("qwen2", heads=14, kv_heads=1, head_dim=32),
    "qwen3": tiny_config("qwen3"),
    "odd vocab": tiny_config(vocab=301),
}


@cache
def weights(name: str) -> Tensors:
    """Tiny weights with a spread like a trained model's: logits of a few nats."""
    return Tensors({key: tensor / 3 for key, tensor in tiny_tensors(CONFIGS[name]).items()})


POISON = 200
"""The token whose embedding is damaged in `damaged`."""


def damaged() -> Tensors:
    """Weights with one row of numbers that are none."""
    tensors = {name: tensor.clone() for name, tensor in SOURCE.tensors.items()}
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    return Tensors(tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_any_frames_do_what_the_torch_program_does(name: str) -> None:
    crowd = Crowd(Twins(CONFIGS[name], weights(name)), seed=1, drafts=False)
    for _ in range(40):
        crowd.frame()
    assert crowd.kinds >= {"prefill", "scored", "rounds", "copies", "mixed"}


@pytest.mark.parametrize("rejects", [False, True], ids=["match", "rejection"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_any_rounds_do_what_the_torch_program_does(draft: str, rejects: bool) -> None:
    crowd = Crowd(Twins(CONFIG, SOURCE, DRAFTS[draft](), rejects=rejects), seed=2, drafts=True)
    for _ in range(60):
        crowd.frame()
    assert crowd.kinds == {"prefill", "scored", "rounds", "copies", "ragged", "mixed"}


def test_only_what_a_frame_serves_is_touched() -> None:
    """Ended rows, rows of other slots, and pages of both are as they were after a mixed frame."""
    driver = Driver(CudaProgram, CONFIG, SOURCE, slots=5, shuffle=9)
    program = driver.program
    assert isinstance(program, CudaProgram)
    ids = list(range(60))
    decoding, _ = driver.prompt(0, ids[:20])
    ended, _ = driver.prompt(1, ids[:33], limit=1)
    driver.prompt(2, ids[:40])
    handle, binding = driver.bind(3)
    before = {name: getattr(program.rows, name).clone() for name in ADVANCES}
    keys, values = program.pages.keys.clone(), program.pages.values.clone()
    chunk = LaneInput(handle, 0, False, np.array(ids[:50], np.int32), ids[50], binding)
    shape = GraphShape(GraphKind.MIXED, 5, 128, 1)
    results = driver.run(shape, [LaneInput(ended, 0, True), chunk, LaneInput(decoding, 0, True)])
    assert [len(result.tokens) for result in results] == [0, 0, 1]
    for name in ADVANCES:
        others = [1, 2, 4]
        assert torch.equal(getattr(program.rows, name)[others], before[name][others]), name
    table = program.rows.page_table
    untouched = torch.cat([table[1], table[2], table[3, 2:], table[0, 1:]]).long()  # 50 tokens take two pages of 32
    assert torch.equal(program.pages.keys[:, untouched], keys[:, untouched])
    assert torch.equal(program.pages.values[:, untouched], values[:, untouched])


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=1, top_p=0.5)], ids=["greedy", "cut"])
@pytest.mark.parametrize("draft", ["head", "cut"])
def test_a_row_whose_logits_are_no_numbers_fails_alone(draft: str, sampling: Sampling) -> None:
    """As in the torch program; and its pages and its slot serve the next request as if nothing had been."""
    source = damaged()
    twins = Twins(CONFIG, source, first_layers(CONFIG, source) if draft == "cut" else DRAFTS[draft]())
    forced = replace(sampling, logit_bias=((POISON, 100.0),))
    handles = []
    for slot, each in enumerate((sampling, forced)):
        handle, binding = twins.bind(slot, each, 40)
        prompt = LaneInput(handle, 0, True, np.arange(30, dtype=np.int32), binding=binding)
        (result,) = twins.run(GraphShape(GraphKind.PREFILL, 1, PROMPT_ROWS), [prompt])
        handles.append(handle)
    assert result.tokens == (POISON,)
    banning = History(np.zeros(0, np.int32), np.zeros(0, np.int32), (POISON,))
    for width in (1, 4, 4):
        shape = rectangular(GraphKind.SPECULATIVE, SLOTS, width)
        lanes = [LaneInput(handle, 0, True, history=banning, width=width) for handle in handles]
        with pytest.raises(FloatingPointError, match="slot 1"):
            twins.run(shape, lanes)
        twins.run(shape, lanes[:1])
    handle, binding = twins.bind(1, sampling, 40)
    prompt = LaneInput(handle, 0, True, np.arange(20, dtype=np.int32), binding=binding)
    twins.run(GraphShape(GraphKind.PREFILL, 1, PROMPT_ROWS), [prompt])
    for width in (1, 4, 3):
        shape = rectangular(GraphKind.SPECULATIVE, SLOTS, width)
        twins.run(shape, [LaneInput(each, 0, True, width=width) for each in (handle, handles[0])])


def test_scores_that_are_no_numbers_fail_the_frame() -> None:
    twins = Twins(CONFIG, damaged())
    handle, binding = twins.bind(0, Sampling(temperature=0.0), 4)
    prompt = LaneInput(handle, 0, False, np.array([1, 2, POISON, 3], np.int32), 4, replace(binding, prompt_logprobs=2))
    with pytest.raises(FloatingPointError, match="not finite"):
        twins.run(GraphShape(GraphKind.SCORED_PREFILL, 1, PROMPT_ROWS), [prompt])


def test_a_queued_round_is_no_wider_than_what_the_one_before_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host does not know yet how many tokens that gave: checks are of what it knows."""
    monkeypatch.setattr(FrameIo, "check", lambda io, frame: None)
    for draft in DRAFTS:
        twins = Twins(CONFIG, SOURCE, DRAFTS[draft]())
        handle, binding = twins.bind(2, Sampling(temperature=0.0), 6)
        prompt = LaneInput(handle, 0, True, np.arange(9, dtype=np.int32), binding=binding)
        twins.run(GraphShape(GraphKind.PREFILL, 1, PROMPT_ROWS), [prompt])
        results: list[LaneResult] = []
        while not results or results[-1].ended is None:
            lane = LaneInput(handle, 0, True, width=WIDTH)
            results += twins.run(rectangular(GraphKind.SPECULATIVE, SLOTS, WIDTH), [lane])
        assert results[-1].verified < WIDTH or draft == "whole"
        assert sum(len(result.tokens) for result in results) == 5
        (behind,) = twins.run(rectangular(GraphKind.SPECULATIVE, SLOTS, WIDTH), [lane])
        assert (behind.tokens, behind.ended, behind.verified) == ((), None, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_the_torch_decoder(dtype: torch.dtype) -> None:
    ids = torch.arange(0, 120, 2)
    decoder = Decoder(CONFIG, SOURCE, 64, dtype)
    expected = decoder.residual(ids, [Span(0, 60, 0, torch.tensor([1, 0]))], KvPages.allocate(CONFIG, 2, dtype))
    forward = Forward(
        CONFIG,
        SOURCE,
        CudaPages.allocate(CONFIG, 2, 32, dtype),
        device=torch.device("cpu"),
        dtype=dtype,
        positions=64,
        attention=PlainAttention(),
    )
    spans = forward.spans(Packing.of(torch.tensor([60]), 64), torch.tensor([0]), torch.tensor([[1, 0]]).int(), 64)
    got = forward.residual(torch.cat((ids, ids[:4])), spans)[:60]
    assert float((got - expected).abs().max() / expected.abs().max()) < 0.02
