"""Which target rows the lanes of a ragged program get.

Owns the one rule by which programs, their simulation and selection share out a program's target rows
(docs/scheduling.md, "Speculative rounds"). Does not own ceilings or probabilities. Surprising rule: it is greedy and
still exact, since no joint probability rises with depth: a lane's next prefix is never worth more than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def allocate(joint: Sequence[Sequence[float]], ceilings: Sequence[int], target_rows: int) -> list[int]:
    """The rows of each lane: its pending token's, then as many of its proposals as rows and its ceiling (>= 1) allow.

    `joint` has for each lane the probability that its first d = 1.. proposals are all accepted. The likeliest prefix
    goes first; ties go to the shorter prefix, then to the earlier lane. There are at least as many rows as lanes.
    """
    lengths = [1] * len(ceilings)
    reach = [min(ceiling, 1 + len(lane)) for lane, ceiling in zip(joint, ceilings, strict=True)]
    frontier = [(-lane[0], 1, slot) for slot, lane in enumerate(joint) if reach[slot] > 1]
    heapify(frontier)
    for _ in range(target_rows - len(lengths)):
        if not frontier:
            break
        _, depth, slot = heappop(frontier)
        lengths[slot] = length = depth + 1
        if length < reach[slot]:
            heappush(frontier, (-joint[slot][depth], length, slot))
    return lengths
