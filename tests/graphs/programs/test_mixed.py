"""Mixed frames of the torch program in float32: the logits of separate prefill and decode."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from flare.model import Model
from tests.graphs.mixed_requests import Request, differences, in_mixed_frames, separately
from tests.graphs.programs_driver import Driver, Tensors, reference
from tests.tiny_models import tiny_config, tiny_tensors

TOLERANCE = 1e-3
CONFIGS = {"llama": tiny_config(), "window": tiny_config(sliding_window=40), "qwen3": tiny_config("qwen3")}


@cache
def weights(name: str) -> Tensors:
    """Tiny weights."""
    return Tensors({key: tensor / 2 for key, tensor in tiny_tensors(CONFIGS[name]).items()})


def requests(vocab: int, lengths: tuple[tuple[int, int], ...]) -> list[Request]:
    """Requests with prompts and further tokens of these numbers."""
    random = np.random.default_rng(len(lengths))
    return [
        Request(slot, [int(i) for i in random.integers(0, vocab, prompt + decoded)], prompt)
        for slot, (prompt, decoded) in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt_rows", [1, 2])
def test_logits_are_those_of_separate_prefill_and_decode(name: str, prompt_rows: int) -> None:
    lengths = ((3, 20), (40, 12), (70, 5), (33, 2))
    separate, mixed = (requests(CONFIGS[name].vocab, lengths) for _ in range(2))
    separately(Driver(reference, CONFIGS[name], weights(name), shuffle=1), separate, chunk=64)
    random = np.random.default_rng(prompt_rows)
    driver = Driver(reference, CONFIGS[name], weights(name), shuffle=2)
    in_mixed_frames(driver, mixed, lambda: int(random.integers(1, 30)), prompt_rows)
    assert differences(separate, mixed) <= TOLERANCE


def test_logits_of_the_default_model(default_model: Model) -> None:
    text = default_model.tokenizer.encode("A frog sat on a log and thought of flies and summer rain. " * 12, False)
    spans = ((text[:9], 4), (text[20:90], 66))
    separate, mixed = ([Request(slot, ids, prompt) for slot, (ids, prompt) in enumerate(spans)] for _ in range(2))
    driver = Driver(reference, default_model.config, default_model.weights, slots=2, shuffle=1)
    separately(driver, separate, chunk=64)
    in_mixed_frames(driver, mixed, lambda: 24, 1)
    largest = differences(separate, mixed)
    print(f"largest difference of logits {largest:.2e}")
    assert largest <= TOLERANCE
