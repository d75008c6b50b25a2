"""Which target rows the lanes of a ragged program get, within the program.

Owns what `flare.machines.allocation` defines, over tensors. Surprising rule: there is no frontier: since no joint
probability rises with depth, the prefixes that the greedy rule takes are the first ones in the order of probability,
depth and slot.
"""

from __future__ import annotations

import torch


def share_out(
    joint: torch.Tensor, depth: torch.Tensor, slot: torch.Tensor, running: torch.Tensor, target_rows: int
) -> torch.Tensor:
    """The rows int64[N] of each lane: one, and as many of its first `depth` int64[N] proposals as it gets by their
    joint probability float32[N, D]. Lanes that are not `running` bool[N] get none that count."""
    lanes, depths = joint.shape
    order = torch.where(running, slot, torch.iinfo(torch.int64).max).argsort()
    step = torch.arange(depths, device=joint.device)[:, None]
    wanted = (step < depth[order]) & running[order]
    value = torch.where(wanted, joint[order].T, -1.0).flatten()  # the shortest prefixes first, then the first slots
    ranked = value.sort(descending=True, stable=True).indices
    rank = torch.empty_like(ranked).scatter_(0, ranked, torch.arange(len(ranked), device=joint.device))
    granted = wanted & (rank < target_rows - running.sum()).view(depths, lanes)
    return torch.empty_like(slot).scatter_(0, order, 1 + granted.sum(0))
