"""Rows are shared out within the program as the rule says."""

from __future__ import annotations

import numpy as np
import torch

from flare.graphs.cuda.allocation import share_out
from flare.machines.allocation import allocate


def test_rows_are_those_of_the_rule_in_every_tie() -> None:
    random = np.random.default_rng(2)
    for _ in range(400):
        lanes, depths = int(random.integers(1, 9)), int(random.integers(1, 8))
        coarse = (
            random.choice([0.0, 0.25, 0.5, 1.0], (lanes, depths))
            if random.random() < 0.7
            else random.random((lanes, depths))
        )
        joint = torch.from_numpy(coarse).float().cumprod(1)
        depth = torch.from_numpy(random.integers(0, depths + 1, lanes))
        slot = torch.from_numpy(random.permutation(64)[:lanes])
        running = torch.from_numpy(random.random(lanes) < 0.8)
        targets = max(int(running.sum()), int(random.integers(1, lanes * (depths + 1) + 2)))
        got = share_out(joint, depth, slot, running, targets)
        order = [lane for lane in slot.argsort().tolist() if running[lane]]
        ceilings = [int(depth[lane]) + 1 for lane in order]
        expected = allocate([joint[lane, : int(depth[lane])].tolist() for lane in order], ceilings, targets)
        assert got[order].tolist() == expected
