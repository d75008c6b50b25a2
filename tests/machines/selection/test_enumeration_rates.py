"""Normalizers and reference intervals of random views, worked out a second time."""

from __future__ import annotations

from typing import Any

import pytest

from flare.machines.ids import RequestHandle
from flare.machines.selection.board import Board
from flare.machines.selection.reference import normalizers
from flare.machines.selection.view import Phase, RequestRow
from tests.machines.oracle.cases import SORTS, case
from tests.machines.oracle.values import Values

CASES = 100


def _sigma(values: Values, row: RequestRow) -> float | None:
    stream = row.phase is Phase.TERMINAL or (row.phase is Phase.DECODE and row.output_left > 0)
    sigma: float | None = values.sigma(row) if stream else None
    return sigma


def _close(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("sort", SORTS)
def test_a_commit_freezes_the_fastest_service_and_the_reference_interval(sort: str) -> None:
    measured = 0
    for number in range(CASES):
        taken = case(sort, number)
        values, found = Values(taken, float), normalizers(Board.of(taken))
        assert set(found) == {RequestHandle(row.slot, row.generation) for row in taken.requests}
        for row in taken.requests:
            mine = found[RequestHandle(row.slot, row.generation)]
            assert mine.tokens_per_ms == _close(values.rate(row)), (number, row.slot)
            assert mine.sigma_ms == _close(_sigma(values, row)), (number, row.slot)
            measured += mine.tokens_per_ms is not None
    assert measured > CASES / 2 or sort == "terminal"
