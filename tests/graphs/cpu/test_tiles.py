"""The compiled program as CPUs without matrix tiles or without AVX-512 run it, and that all ways of attention agree."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from flare.cache import cache_dir
from flare.graphs.cpu import build
from tests.graphs.cpu.test_native import CONFIGS, IDS, scores, weights
from tests.graphs.mixed_requests import differences, in_mixed_frames, separately
from tests.graphs.programs.test_mixed import requests
from tests.graphs.programs_driver import Driver, native

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="no other CPU has these tiles")

LACKING = ("-mno-amx-tile", "-mno-avx512f")


@cache
def library(lacking: str) -> Path:
    """The library built as for a CPU that lacks something."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, lacking))
        return build.native_library(cache_dir())


@pytest.fixture(params=LACKING)
def driver(request: pytest.FixtureRequest) -> Callable[..., Driver]:
    """Makes drivers of that program, on two threads."""
    lacking = partial(native, library=library(request.param))
    return lambda name, **changes: Driver(lacking, CONFIGS[name], weights(name), **changes)


@pytest.mark.parametrize("name", ["llama", "window", "qwen2", "biased"])
def test_both_ways_of_attention_agree(driver: Callable[..., Driver], name: str) -> None:
    got = scores(driver(name).prompt(0, IDS, prompt_logprobs=1)[1])
    expected = scores(Driver(native, CONFIGS[name], weights(name)).prompt(0, IDS, prompt_logprobs=1)[1])
    assert float(np.abs(np.array(got) - expected).mean()) < 0.01


@pytest.mark.parametrize("name", ["llama", "window", "qwen2"])
def test_chunks_and_pages_change_not_a_bit(driver: Callable[..., Driver], name: str) -> None:
    whole = scores(driver(name).prompt(0, IDS, prompt_logprobs=1)[1])
    for chunk, shuffle in ((1, 1), (17, 2), (33, 3)):
        assert scores(driver(name, shuffle=shuffle).prompt(2, IDS, chunk=chunk, prompt_logprobs=1)[1]) == whole


def test_mixed_frames_change_not_a_bit(driver: Callable[..., Driver]) -> None:
    lengths = ((5, 30), (90, 12), (61, 3))
    separate, mixed = (requests(300, lengths) for _ in range(2))
    separately(driver("llama", slots=3), separate, chunk=128)
    in_mixed_frames(driver("llama", slots=3, shuffle=4), mixed, lambda: 37, 1)
    assert differences(separate, mixed) == 0.0
