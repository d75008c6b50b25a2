"""What the fast formats cost in quality, and the reference answers, alone and sixteen at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flare.graphs.cpu.native import LOGITS_ROWS, NativeStep
from flare.graphs.frames import LaneResult
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.programs.decoder import Decoder, Span
from flare.model import Model
from tests.graphs.programs_driver import Driver, native

DATA = Path(__file__).parents[2] / "data"
SURE = {"count": 40, "alpha": 14, "jp": 24, "chat:What is 2+2?": 12, "chat:Repeat exactly: alpha beta gamma": 7}
"""Cases whose every step has a wide margin, and how many tokens of them."""


@pytest.fixture(scope="module")
def driver(default_model: Model) -> Driver:
    """The default model as it serves, in sixteen slots."""
    return Driver(native, default_model.config, default_model.weights, slots=16, max_model_len=256, shuffle=3)


def passages(model: Model) -> list[list[int]]:
    """Token ids of twenty passages of ordinary English."""
    texts = (DATA / "passages.txt").read_text(encoding="utf-8").split("\n\n")
    return [model.tokenizer.encode(text.strip(), False) for text in texts]


def fast_logits(driver: Driver, ids: list[int]) -> torch.Tensor:
    """Logits of every position, scored in chunks no larger than the block of logits that is kept. The last chunk is a
    single token, since drawing the token that follows it uses the block again."""
    blocks: list[torch.Tensor] = []
    program = driver.program
    assert isinstance(program, NativeStep)
    plain = program.step

    def keep(lanes: int, scored: bool = False, depth: int = 0, target_rows: int = 0, rejects: bool = False) -> int:
        took = plain(lanes, scored, depth, target_rows, rejects)
        blocks.append(program.logits[: int(program.buffers.rows[0]), : driver.config.vocab].clone())
        return took

    program.step = keep  # type: ignore[method-assign]
    driver.prompt(0, ids + [0] * ((1 - len(ids)) % LOGITS_ROWS), chunk=LOGITS_ROWS, prompt_logprobs=0)
    program.step = plain  # type: ignore[method-assign]
    return torch.cat(blocks)[: len(ids)]


def test_quality_of_the_formats(default_model: Model, driver: Driver) -> None:
    """Mean KL to float32 at most 0.01; the same first choice at 99% of positions that float32 is sure of by 0.5 nat."""
    exact = Decoder(default_model.config, default_model.weights, 512, torch.float32)
    divergences, same, sure = [], 0, 0
    texts = passages(default_model)
    assert len(texts) == 20 and min(map(len, texts)) >= 90
    for ids in texts:
        pages = torch.arange(-(-len(ids) // PAGE_TOKENS))
        kv = KvPages.allocate(default_model.config, len(pages), torch.float32)
        with torch.inference_mode():
            hidden = exact.forward(torch.tensor(ids), [Span(0, len(ids), 0, pages)], kv)
            expected = exact.logits(hidden).log_softmax(-1)
        got = fast_logits(driver, ids).log_softmax(-1)
        divergences.append((expected.exp() * (expected - got)).sum(-1))
        best = expected.topk(2).values
        wide = best[:, 0] - best[:, 1] > 0.5
        sure += int(wide.sum())
        same += int((wide & (got.argmax(-1) == expected.argmax(-1))).sum())
    divergence = float(torch.cat(divergences).mean())
    print(f"mean KL {divergence:.5f}, same first choice {same}/{sure}")
    assert divergence <= 0.01
    assert same >= 0.99 * sure


def test_reference_answers_alone_and_sixteen_at_once(driver: Driver) -> None:
    cases = json.loads((DATA / "smollm2_135m_q4_1_greedy.json").read_text())
    for name, length in SURE.items():
        assert driver.generate(5, cases[name]["ids"], limit=length) == cases[name]["out"][:length]
    names = [list(SURE)[i % len(SURE)] for i in range(16)]
    handles, tokens = [], []
    for slot, name in enumerate(names):
        handle, results = driver.prompt(slot, cases[name]["ids"], limit=SURE[name])
        handles.append(handle)
        tokens.append(list(results[-1].tokens))
    while any(len(row) < SURE[name] for row, name in zip(tokens, names, strict=True)):
        results = list(driver.decode(handles))
        _extend(tokens, results)
    for row, name in zip(tokens, names, strict=True):
        assert row == cases[name]["out"][: SURE[name]]


def _extend(tokens: list[list[int]], results: list[LaneResult]) -> None:
    for row, result in zip(tokens, results, strict=True):
        row.extend(result.tokens)
