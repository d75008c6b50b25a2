"""Each planted fault is found, and soon.

Surprising rule: only an assertion of the worlds counts as found; a plant that no longer fits the machines raises
something else, and fails its test.
"""

from __future__ import annotations

import pytest

from .__main__ import EVENTS
from .plants import PLANTS
from .scenario import scenario
from .world import World

SEEDS = 200


@pytest.mark.parametrize("fault", PLANTS)
def test_found(fault: str) -> None:
    with PLANTS[fault]():
        assert first_failure() is not None


def first_failure() -> int | None:
    """The first seed whose world fails; None if none of the first `SEEDS` does."""
    for seed in range(SEEDS):
        try:
            World(scenario(seed)).run(EVENTS)
        except AssertionError:
            return seed
    return None
