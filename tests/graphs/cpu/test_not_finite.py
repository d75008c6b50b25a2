"""Logits that are no numbers: the frame fails and says so, and nobody after it suffers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.frames import LaneInput, Sampling
from flare.graphs.weights.errors import ModelError
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from tests.graphs.drafts import random_head
from tests.graphs.host import CATALOG, DECODE, PREFILL, SCORED, Host, Row, banning, decode_lane, prompt_of
from tests.graphs.programs_driver import Tensors
from tests.tiny_models import tiny_config, tiny_tensors

POISON = 200
"""The token whose embedding is damaged; no prompt of `prompt_of` has it, and the head does not read it."""


COPIES = rectangular(GraphKind.SPECULATIVE, 2, 3, source=Source.COPY)
ROUNDS = rectangular(GraphKind.SPECULATIVE, 2, 3)


def cpu_device(eager: bool, damaged: str, row: int) -> CpuDevice:
    """A device of four slots whose model has one row of numbers that are none, with a draft head."""
    tensors = {name: tensor / 2 for name, tensor in tiny_tensors(tiny_config()).items()}
    tensors[damaged][row] = float("nan")
    with tempfile.TemporaryDirectory() as folder:
        draft = random_head(Path(folder), tiny_config(), Tensors(tensors))
    return CpuDevice(
        tiny_config(),
        Tensors(tensors),
        request_slots=4,
        max_model_len=256,
        kv_bytes=8 << 20,
        dtype="float32" if eager else "auto",
        threads=1,
        eager=eager,
        cache_dir=cache_dir(),
        warn=print,
        draft=draft,
    )


@pytest.fixture(params=[False, True], ids=["compiled", "eager"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A started device with a damaged embedding of POISON."""
    device = cpu_device(request.param, "model.embed_tokens.weight", POISON)
    try:
        yield Host(device, (*CATALOG, COPIES, ROUNDS))
    finally:
        device.close()


def lane_of(row: Row, *, target: int | None = None) -> LaneInput:
    """The whole prompt of a row."""
    return LaneInput(row.handle, 0, target is None, np.array(row.prompt, np.int32), target, row.binding)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=1), Sampling(seed=1, top_p=0.5)])
def test_a_draw_from_no_numbers_is_an_error(host: Host, sampling: Sampling) -> None:
    row = host.admit(0, [1, POISON, 2], sampling=sampling, logprobs=2)
    completion = host.run(PREFILL, [lane_of(row)])
    assert "slot 0" in (completion.error or "")
    assert "not finite" in (completion.error or "")


def test_a_score_that_is_no_number_is_an_error(host: Host) -> None:
    row = host.admit(0, [1, 2, POISON, 3], prompt_logprobs=2)
    completion = host.run(SCORED, [lane_of(row, target=4)])
    assert "not finite" in (completion.error or "")


@pytest.mark.parametrize("shape", [DECODE[2], ROUNDS], ids=lambda shape: shape.name)
def test_a_frame_behind_a_failed_one_is_harmless_and_its_pages_are_clean_again(host: Host, shape: GraphShape) -> None:
    prompt = prompt_of(40, 3)
    tokens = list(host.generate(host.admit(0, prompt), 6))
    forced = Sampling(temperature=0.0, logit_bias=((POISON, 100.0),))
    bad, good = host.admit(1, prompt, sampling=forced), host.admit(2, prompt)
    host.prefill(bad)
    host.prefill(good)
    assert bad.tokens == [POISON]
    width = shape.width
    lanes = [replace(decode_lane(row, width=width), history=banning(5)) for row in (good, bad)]
    for _ in range(2):
        host.submit(shape, lanes)
    assert all("slot 1" in (host.wait().error or "") for _ in range(2))
    again = host.admit(3, prompt, pages=bad.binding.pages)  # beyond its end lies what the failed steps stored
    assert host.generate(again, 6) == tokens


@pytest.mark.parametrize("bias", [100.0, -100.0], ids=["accepted", "not accepted"])
def test_a_proposal_that_gives_no_numbers_is_an_error(host: Host, bias: float) -> None:
    """Even if it is not accepted: rows attend together, and nothing times no number is no number."""
    sampling = Sampling(temperature=0.0, logit_bias=((POISON, bias),))
    row = host.admit(1, prompt_of(9, 4), sampling=sampling, logprobs=1)
    host.prefill(row, history=banning(POISON))
    lane = replace(decode_lane(row, width=3), proposals=np.array([POISON, 5], np.int32))
    completion = host.run(COPIES, [lane])
    assert "slot 1" in (completion.error or "") and "not finite" in (completion.error or "")


@pytest.mark.parametrize("eager", [False, True])
def test_a_damaged_model_is_refused_before_it_serves(eager: bool) -> None:
    device = cpu_device(eager, "model.layers.1.mlp.down_proj.weight", 3)
    with pytest.raises(ModelError, match="finite"):
        device.prepare(CATALOG, lambda *_: None)
    device.close()
