"""Many worlds, each from one seed, each against the second account.

Owns how many are run: FLARE_SIMULATION_SEEDS, 1,000 unless set, in blocks over as many processes as there are cores. A
failure carries the command that runs its world again. Surprising rule: a block of worlds in which some fault or some
kind of graph never came about fails too, since it would show nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from .__main__ import EVENTS, run_worlds
from .scenario import scenario
from .seen import SEEN
from .world import World

SEEDS = int(os.environ.get("FLARE_SIMULATION_SEEDS", "1000"))
BLOCK = 250
Blocks = dict[int, "Future[Counter[str]]"]


@pytest.fixture(scope="module")
def blocks() -> Iterator[Blocks]:
    """All blocks under way, by their first seed; fresh processes, which know nothing of what other tests did."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=spawn) as pool:
        yield {first: pool.submit(run_worlds, first, min(first + BLOCK, SEEDS)) for first in range(0, SEEDS, BLOCK)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_worlds(first: int, blocks: Blocks) -> None:
    seen = blocks[first].result()
    assert first + BLOCK > SEEDS or not SEEN - seen.keys()


def test_a_seed_is_one_world() -> None:
    """The same seed brings the same events and effects, word for word."""
    told: list[list[str]] = [[], []]
    for lines in told:
        World(scenario(11), lines.append).run(EVENTS)
    assert told[0] == told[1]
    assert len(told[0]) > 100
