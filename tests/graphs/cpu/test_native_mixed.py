"""Mixed frames of the compiled program: not a bit differs from separate frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare.graphs.frames import LaneInput
from flare.machines.graph import GraphKind, GraphShape
from flare.model import Model
from tests.graphs.cpu.test_native import CONFIGS, IDS, driver, weights
from tests.graphs.mixed_requests import Request, differences, in_mixed_frames, separately
from tests.graphs.programs.test_mixed import requests
from tests.graphs.programs_driver import Driver, native, reference

LENGTHS = ((5, 30), (90, 12), (100, 8), (61, 3), (2, 1), (64, 2))


@pytest.mark.parametrize("name", ["llama", "window", "qwen2", "odd vocab"])
@pytest.mark.parametrize("prompt_rows", [1, 3])
def test_mixed_frames_change_not_a_bit(name: str, prompt_rows: int) -> None:
    separate, mixed = (requests(300, LENGTHS) for _ in range(2))
    separately(driver(name, slots=6), separate, chunk=128)
    random = np.random.default_rng(prompt_rows)
    in_mixed_frames(driver(name, slots=6, shuffle=4), mixed, lambda: int(random.integers(1, 43)), prompt_rows)
    assert differences(separate, mixed) == 0.0


def test_logits_are_those_of_the_torch_program() -> None:
    exact, fast = (requests(300, LENGTHS) for _ in range(2))
    in_mixed_frames(Driver(reference, CONFIGS["llama"], weights("llama"), slots=6), exact, lambda: 40, 2)
    in_mixed_frames(driver("llama", slots=6), fast, lambda: 40, 2)
    drawn = [torch.stack([logits for request in served for logits in request.logits]) for served in (exact, fast)]
    assert np.corrcoef(drawn[0].flatten(), drawn[1].flatten())[0, 1] > 0.999
    assert float((drawn[0] - drawn[1]).abs().mean()) < 0.03  # 8-bit activations and weights


def test_the_default_model_in_mixed_frames(default_model: Model) -> None:
    text = default_model.tokenizer.encode("The river had no name, and nobody who crossed it gave it one. " * 20, False)
    spans = ((text[:16], 10), (text[7:240], 231), (text[100:170], 67))
    separate, mixed = ([Request(slot, ids, prompt) for slot, (ids, prompt) in enumerate(spans)] for _ in range(2))
    run = Driver(native, default_model.config, default_model.weights, slots=3)
    separately(run, separate, chunk=128)
    in_mixed_frames(run, mixed, lambda: 100, 1)
    assert differences(separate, mixed) == 0.0


def test_only_what_a_frame_serves_is_touched() -> None:
    """Ended rows, rows of other slots, and pages of both are as they were after a mixed frame."""
    run = driver(slots=5, shuffle=9)
    decoding, _ = run.prompt(0, IDS[:20])
    ended, _ = run.prompt(1, IDS[:33], limit=1)
    absent, _ = run.prompt(2, IDS[:40])
    handle, binding = run.bind(3)
    program = run.program
    names = ("generation", "pending", "committed", "remaining", "ended")
    before = {name: getattr(program.rows, name).clone() for name in names}
    keys, values = program.kv.keys.clone(), program.kv.values.clone()
    chunk = LaneInput(handle, 0, False, np.array(IDS[:50], np.int32), IDS[50], binding)
    lanes = [LaneInput(ended, 0, True), chunk, LaneInput(decoding, 0, True)]
    results = run.run(GraphShape(GraphKind.MIXED, 5, 128, 1), lanes)
    assert [result.tokens for result in results][:2] == [(), ()]
    assert len(results[2].tokens) == 1
    for name in names:
        after = getattr(program.rows, name)
        assert torch.equal(after[[1, 2, 4]], before[name][[1, 2, 4]]), name
    assert int(program.rows.committed[3]) == 50
    assert int(program.rows.pending[3]) == -1
    tables = program.rows.page_table
    untouched = torch.cat([tables[1], tables[2], tables[3, 2:]]).long()  # 50 tokens take two pages of 32
    assert torch.equal(program.kv.keys[:, untouched], keys[:, untouched])
    assert torch.equal(program.kv.values[:, untouched], values[:, untouched])
    assert absent.slot == 2
