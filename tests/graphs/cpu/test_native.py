"""The compiled program against the torch program, and against itself in other batches, chunks, slots and pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from flare.graphs.cpu.native import NativeStep, unsupported
from flare.graphs.frames import History, LaneResult, Sampling
from flare.graphs.programs.rows import ENDED_STOP
from flare.graphs.programs.sampling import sample
from flare.machines.request import EndReason
from tests.graphs.programs_driver import Driver, Tensors, native, reference
from tests.tiny_models import tiny_config, tiny_tensors

CONFIGS = {
    "llama": tiny_config(),
    "tied": tiny_config(tie_embeddings=True),
    "biased": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "window": tiny_config(sliding_window=40),
    "qwen2": tiny_config("qwen2", heads=14, kv_heads=1, head_dim=32),
    "qwen3": tiny_config("qwen3"),
    "odd vocab": tiny_config(vocab=301),
}
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 300, 90)]
SAMPLED = Sampling(temperature=1.0, seed=11)


@cache
def weights(name: str) -> Tensors:
    """Tiny weights with a spread like a trained model's: logits of a few nats."""
    return Tensors({key: tensor / 3 for key, tensor in tiny_tensors(CONFIGS[name]).items()})


def driver(name: str = "llama", **changes: Any) -> Driver:
    """The compiled program of a configuration."""
    return Driver(native, CONFIGS[name], weights(name), **changes)


def scores(results: list[LaneResult]) -> list[float]:
    """Log-probabilities of a scored prompt."""
    return [score.logprob for result in results for score in result.prompt_scores or ()]


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_torch_program(name: str) -> None:
    expected = scores(Driver(reference, CONFIGS[name], weights(name)).prompt(0, IDS, prompt_logprobs=1)[1])
    got = scores(driver(name).prompt(0, IDS, prompt_logprobs=1)[1])
    assert len(got) == len(IDS) - 1
    assert float(np.abs(np.array(got) - expected).mean()) < 0.03  # 8-bit activations and weights
    assert np.corrcoef(got, expected)[0, 1] > 0.999


@pytest.mark.parametrize("name", ["llama", "window", "qwen2"])
def test_chunks_and_pages_change_not_a_bit(name: str) -> None:
    whole = scores(driver(name).prompt(0, IDS, prompt_logprobs=1)[1])
    for chunk, shuffle in ((1, 1), (17, 2), (33, 3), (64, 4)):
        other = driver(name, shuffle=shuffle)
        assert scores(other.prompt(2, IDS, chunk=chunk, prompt_logprobs=1)[1]) == whole


@pytest.mark.parametrize("rows", [1, 50])
def test_a_capacity_may_be_no_multiple_of_a_tile(rows: int) -> None:
    """Activations lie in tiles of 16 rows: with fewer than whole tiles, the last rows were written beyond the end."""
    expected = scores(driver().prompt(0, IDS, prompt_logprobs=1)[1])
    narrow = driver(prompt_rows=rows, slots=1)
    assert scores(narrow.prompt(0, IDS, prompt_logprobs=1)[1]) == expected


def test_a_batch_changes_not_a_bit() -> None:
    alone = driver(slots=16)
    prompts = [IDS[i : i + 10 + 3 * i] for i in range(16)]
    settings = [Sampling(temperature=1.0, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(16)]
    expected = [alone.generate(0, prompts[i], settings[i], limit=6) for i in range(16)]
    together = driver(slots=16, shuffle=7)
    order = [int(slot) for slot in np.random.default_rng(1).permutation(16)]
    handles, tokens = [], []
    for i in range(16):
        handle, results = together.prompt(order[i], prompts[i], settings[i], limit=6)
        handles.append(handle)
        tokens.append(list(results[-1].tokens))
    for _ in range(5):
        for i, result in enumerate(together.decode(handles)):
            tokens[i].extend(result.tokens)
    assert tokens == expected


SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(temperature=0.8),
    "top_k": Sampling(temperature=1.3, top_k=5),
    "top_k 1": Sampling(temperature=1.3, top_k=1),
    "top_k beyond": Sampling(temperature=1.0, top_k=10_000_000),
    "top_p": Sampling(temperature=1.0, top_p=0.7),
    "top_p 0": Sampling(temperature=1.0, top_p=0.0),
    "min_p": Sampling(temperature=1.0, min_p=0.2),
    "all cuts": Sampling(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
    "bias": Sampling(temperature=1.0, logit_bias=((7, 3.5), (9, -100.0))),
    "penalties": Sampling(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_are_those_of_the_torch_sampler(name: str) -> None:
    """On the very logits that the compiled program drew from, 40 positions with a seed of their own each."""
    run = driver(slots=1)
    program = run.program
    assert isinstance(program, NativeStep)
    seen = np.array(sorted({3, 5, 7, *IDS[:20]}), np.int32)
    history = History(seen, np.arange(len(seen), dtype=np.int32) % 3, banned=(11, 12))
    agreed, drawn = 0, set()
    for seed in range(40):
        sampling = replace(SETTINGS[name], seed=seed)
        _, results = run.prompt(0, IDS[: 5 + seed], sampling, history=history)
        logits = program.logits[0, : run.config.vocab].clone()
        program.rows.committed[0] -= 1
        agreed += sample(logits, program.rows, program.buffers, 0) == results[-1].tokens[0]
        drawn.add(results[-1].tokens[0])
    assert agreed == 40
    assert not drawn & {11, 12}
    assert len(drawn) > 5 or name == "bias"


def test_draws_follow_the_distribution() -> None:
    """2,000 positions of one prompt's distribution: seeds stand in for positions."""
    run = driver(slots=1)
    program = run.program
    assert isinstance(program, NativeStep)
    counts = np.zeros(run.config.vocab)
    draws = 2000
    for seed in range(draws):
        _, results = run.prompt(0, IDS[:2], Sampling(temperature=0.25, seed=seed))
        counts[results[-1].tokens[0]] += 1
    expected = (program.logits[0, : run.config.vocab] / 0.25).softmax(-1).numpy() * draws
    often = expected >= 8
    chi_square = float(((counts[often] - expected[often]) ** 2 / expected[often]).sum())
    freedom = int(often.sum())
    assert freedom >= 10
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_an_ended_row_changes_nothing_and_returns_no_tokens() -> None:
    run = driver()
    free, _ = run.prompt(0, IDS[:10], limit=8)
    first = [run.decode([free])[0].tokens[0] for _ in range(3)]
    handle, results = run.prompt(1, IDS[:10], limit=8, stop=(first[0],))
    other, _ = run.prompt(2, IDS[:20], limit=3)
    assert results[-1].ended is None
    ended = run.decode([handle, other])
    assert ended[0].tokens == (first[0],)
    assert ended[0].ended is EndReason.STOP
    before = [tensor.clone() for tensor in (run.program.kv.keys, run.program.kv.values)]
    last = run.decode([handle, other])
    assert (last[0].tokens, last[0].committed, last[0].ended) == ((), ended[0].committed, None)
    assert last[1].ended is EndReason.LENGTH
    assert int(run.program.rows.ended[1]) == ENDED_STOP
    both = run.decode([handle, other])
    assert [result.tokens for result in both] == [(), ()]
    mine = run.program.rows.page_table[1, 0]
    assert torch.equal(before[0][:, mine], run.program.kv.keys[:, mine])
    assert torch.equal(before[1][:, mine], run.program.kv.values[:, mine])


def test_stop_comes_before_length() -> None:
    run = driver()
    token = run.generate(0, IDS[:10], limit=1)[0]
    _, results = run.prompt(0, IDS[:10], limit=1, stop=(token,))
    assert results[-1].ended is EndReason.STOP


def test_what_a_config_needs_is_said_in_words() -> None:
    assert "head_dim" in (unsupported(tiny_config(head_dim=48)) or "")
    assert unsupported(tiny_config()) is None
