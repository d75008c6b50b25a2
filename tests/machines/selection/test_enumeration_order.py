"""The tie order on values that floating point holds exactly, against the enumeration in fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from flare.machines.selection.select import select
from flare.machines.selection.view import View
from tests.machines.oracle.agree import work_of
from tests.machines.oracle.choices import Oracle
from tests.machines.oracle.exact import pairs_view, stages_view, tokens_view

BLOCK = 120
SORTS = {"tokens": tokens_view, "stages": stages_view, "pairs": pairs_view}


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("sort", SORTS)
def test_exact_ties_follow_the_total_order(sort: str, block: int) -> None:
    draw: Callable[[str], View] = SORTS[sort]
    ties = 0
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        taken = draw(f"{sort}/{number}")
        oracle, plan = Oracle(taken, Fraction), select(taken).plan
        wanted = oracle.expected()
        assert plan is not None, number
        best = wanted.choices[0]
        assert work_of(plan) == best.work, number
        assert Fraction(plan.score) == best.draft.score, number
        assert plan.reason is wanted.reason, number
        ties += len(wanted.choices) > 1
    assert ties > 10
