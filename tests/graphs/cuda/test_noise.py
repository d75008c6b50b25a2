"""Noise over tensors is that of single draws, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from flare.graphs.cuda.noise import draw_keys, gumbel, uniform
from flare.graphs.programs import noise

RANDOM = np.random.default_rng(1)
SEEDS = [0, 1, 2**63 - 1, *RANDOM.integers(0, 2**63, 40).tolist()]
POSITIONS = [0, 1, 2**31 - 1, *RANDOM.integers(0, 2**20, 40).tolist()]


def test_every_key_and_variate_is_the_same() -> None:
    tokens = torch.arange(150_000)
    for drafts in (False, True):
        keys = draw_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS), drafts=drafts)
        salt = noise.DRAFT_SALT if drafts else 0
        expected = [noise.draw_key(seed ^ salt, position) for seed, position in zip(SEEDS, POSITIONS, strict=True)]
        assert [(key & (2**32 - 1), key >> 32 & (2**32 - 1)) for key in keys.tolist()] == expected
        assert uniform(keys).tolist() == [noise.uniform(key) for key in expected]
        for index in (1, 2, 7):
            assert torch.equal(gumbel(keys[index : index + 1], tokens)[0], noise.gumbel(expected[index], tokens))
