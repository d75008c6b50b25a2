"""Rounds of two sources, of shared target rows and of probes, against the enumeration."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from flare.machines.graph import Source
from flare.machines.selection.select import select
from flare.machines.selection.view import Reason
from tests.machines.oracle.agree import check, check_terms
from tests.machines.oracle.cases import SORTS, case
from tests.machines.oracle.choices import Oracle
from tests.machines.oracle.rounds import rounds_case

CASES = 300


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("sort", ["sources", "ragged", "probes"])
def test_the_best_round_is_chosen(sort: str, block: int) -> None:
    won: Counter[object] = Counter()
    for number in range(block * CASES, (block + 1) * CASES):
        taken = rounds_case(sort, number)
        try:
            wanted = check(taken, select(taken), Oracle(taken, float))
        except AssertionError as error:
            raise AssertionError(f"rounds_case({sort!r}, {number}): {error}") from error
        if wanted.choices:
            shape = wanted.choices[0].graph.shape
            won[shape.source] += 1
            won["ragged", taken.keeps_prefixes, taken.device_allocates] += shape.ragged
            won[wanted.reason] += 1
    assert won[Source.COPY] >= CASES / 30, won
    if sort == "ragged":
        for kept in (False, True):
            for device in (False, True):
                assert won["ragged", kept, device] >= CASES / 30, won
    if sort == "probes":
        assert won[Reason.ACCEPTANCE_PROBE] >= CASES / 20, won
        assert won[Reason.TIMING_REFRESH] > 0, won


@pytest.mark.parametrize("sort", ["sources", "ragged", "probes"])
def test_the_terms_of_every_candidate_make_up_its_score(sort: str) -> None:
    for number in range(60):
        taken = msgspec.structs.replace(rounds_case(sort, number), host_gap_ms=0.0)
        decision = select(taken, explain=True)
        for candidate in decision.candidates:
            check_terms(candidate)
        if decision.plan is not None:
            assert sum(candidate.lost is None for candidate in decision.candidates) >= 1


@pytest.mark.parametrize("sort", SORTS)
def test_whatever_drains_the_window_pays_the_host_gap(sort: str) -> None:
    for number in range(40):
        taken = msgspec.structs.replace(case(sort, number), host_gap_ms=7.5)
        oracle = Oracle(taken, float)
        if not oracle.close_packing():
            check(taken, select(taken), oracle)
