"""Many worlds, each from one seed, each against the second account.

Owns how many are run: FLARE_SIMULATION_SEEDS, 300 unless set. A failure carries the command that runs its world again.
Surprising rule: a block of worlds in which some fault never came about fails too, since it would show nothing.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .__main__ import EVENTS
from .scenario import scenario
from .world import World

SEEDS = int(os.environ.get("FLARE_SIMULATION_SEEDS", "300"))
BLOCK = 50
SEEN = {
    *("cancelled", "completed", "decisions", "delivered", "failed", "frames_1", "frames_2", "lost"),
    *("refused", "refused_commits", "stopped"),
}


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_worlds(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, min(first + BLOCK, SEEDS)):
        world = World(scenario(seed))
        try:
            world.run(EVENTS)
        except BaseException as error:
            error.add_note(f"run it again: python -m tests.simulation {seed} --verbose")
            raise
        total += world.counts
    assert first + BLOCK > SEEDS or total.keys() >= SEEN


def test_a_seed_is_one_world() -> None:
    """The same seed brings the same events and effects, word for word."""
    told: list[list[str]] = [[], []]
    for lines in told:
        World(scenario(11), lines.append).run(60)
    assert told[0] == told[1]
    assert len(told[0]) > 100
