"""A ledger of either purpose: every cell, the given values, and its bound whatever happens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.ledger import (
    PROBE,
    REFRESH,
    TRANSITIONS,
    Earned,
    Filled,
    Ledger,
    LedgerEvent,
    LedgerState,
    Opened,
    Overdrawn,
    Repaid,
    Rested,
    Spent,
    Terms,
)
from flare.machines.table import IllegalTransition

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["ledger"]
SMALL = Terms(2, 5, 40)

FUNDED = (("earn", 20),)
HISTORIES: dict[LedgerState, tuple[tuple[str, int], ...]] = {
    LedgerState.IDLE: (),
    LedgerState.EARNING: (("earn", 3),),
    LedgerState.FUNDED: FUNDED,
    LedgerState.OPEN: (*FUNDED, ("open", 0)),
    LedgerState.DEBT: (*FUNDED, ("open", 0), ("close", 11)),
}


def do(ledger: Ledger, action: str, ns: int) -> None:
    match action:
        case "earn":
            ledger.earn(ns)
        case "open":
            ledger.open()
        case "close":
            ledger.close(ns)
        case _:
            ledger.rest()
    ledger.check()


def after(history: tuple[tuple[str, int], ...], terms: Terms = SMALL) -> Ledger:
    ledger = Ledger(terms)
    for action, ns in history:
        do(ledger, action, ns)
    return ledger


@pytest.mark.parametrize("case", range(len(VECTORS)))
def test_given_values(case: int) -> None:
    vector = VECTORS[case]
    ledger = Ledger(REFRESH if vector["ledger"] == "refresh" else PROBE)
    for step in vector["steps"]:
        if step["event"] == "episode":
            do(ledger, "open", 0)
            do(ledger, "close", step["ns"])
        else:
            do(ledger, "rest" if step["event"] == "idle" else "earn", step["ns"])
        assert (ledger.credit, ledger.funded) == (step["expect_credit"], step["expect_funded"])


@pytest.mark.parametrize(("terms", "needed_ns"), [(REFRESH, 2_495_000_000), (PROBE, 495_000_000)])
def test_the_ordinary_service_that_funds_the_first_episode(terms: Terms, needed_ns: int) -> None:
    """For timing refresh exactly 2,495 ms, and for an acceptance probe exactly 495 ms."""
    ledger = Ledger(terms)
    ledger.earn(needed_ns - 1)
    assert not ledger.funded
    ledger.earn(1)
    assert ledger.funded and ledger.credit_ns == 5_000_000


CELLS: tuple[tuple[LedgerState, str, int, LedgerEvent | None], ...] = (
    (LedgerState.IDLE, "earn", 0, Earned()),
    (LedgerState.IDLE, "earn", 19, Earned()),
    (LedgerState.IDLE, "earn", 20, Filled()),
    (LedgerState.IDLE, "open", 0, None),
    (LedgerState.IDLE, "close", 1, None),
    (LedgerState.IDLE, "rest", 0, Rested()),
    (LedgerState.EARNING, "earn", 16, Earned()),
    (LedgerState.EARNING, "earn", 17, Filled()),
    (LedgerState.EARNING, "open", 0, None),
    (LedgerState.EARNING, "close", 1, None),
    (LedgerState.EARNING, "rest", 0, Rested()),
    (LedgerState.FUNDED, "earn", 0, Filled()),
    (LedgerState.FUNDED, "open", 0, Opened()),
    (LedgerState.FUNDED, "close", 1, None),
    (LedgerState.FUNDED, "rest", 0, Rested()),
    (LedgerState.OPEN, "earn", 1, Filled()),
    (LedgerState.OPEN, "open", 0, None),
    (LedgerState.OPEN, "close", 8, Spent()),
    (LedgerState.OPEN, "close", 9, Overdrawn()),
    (LedgerState.OPEN, "rest", 0, None),
    (LedgerState.DEBT, "earn", 7, Earned()),
    (LedgerState.DEBT, "earn", 8, Repaid()),
    (LedgerState.DEBT, "earn", 28, Filled()),
    (LedgerState.DEBT, "open", 0, None),
    (LedgerState.DEBT, "close", 1, None),
    (LedgerState.DEBT, "rest", 0, Rested()),
)


@pytest.mark.parametrize(("before", "action", "ns", "event"), CELLS)
def test_every_cell(before: LedgerState, action: str, ns: int, event: LedgerEvent | None) -> None:
    ledger = after(HISTORIES[before])
    assert ledger.state is before
    held = (ledger.state, ledger.credit)
    if event is None:
        with pytest.raises(IllegalTransition, match=f"ledger: no transition from {before.value}"):
            do(ledger, action, ns)
        assert (ledger.state, ledger.credit) == held
    else:
        do(ledger, action, ns)
        assert ledger.state is TRANSITIONS[before, type(event)]


def test_every_move_of_the_table_is_in_the_tests() -> None:
    assert {(before, type(event)) for before, _, _, event in CELLS if event is not None} == set(TRANSITIONS)
    assert set(HISTORIES) == set(LedgerState)


@pytest.mark.parametrize(("action", "ns"), [("earn", -1), ("close", 0), ("close", -1)])
def test_impossible_durations_are_refused(action: str, ns: int) -> None:
    ledger = after(HISTORIES[LedgerState.OPEN])
    with pytest.raises(ValueError, match="duration_ns"):
        do(ledger, action, ns)
    assert (ledger.state, ledger.credit) == (LedgerState.OPEN, 40)


@given(
    st.sampled_from((SMALL, REFRESH, PROBE)),
    st.lists(st.tuples(st.sampled_from(("earn", "earn", "episode", "idle")), st.integers(1, 10**10)), max_size=60),
)
def test_the_bound_holds_at_every_moment(terms: Terms, attempts: list[tuple[str, int]]) -> None:
    """What was paid stays within the share of ordinary service and one episode; the account is told from history."""
    ledger = Ledger(terms)
    ordinary = paid = last = 0
    credit = 0
    for action, ns in attempts:
        if action == "earn":
            do(ledger, "earn", ns)
            ordinary += ns
            credit = min(terms.cap, credit + terms.earn * ns)
        elif action == "idle":
            do(ledger, "rest", 0)
            credit = min(credit, 0)
        elif credit == terms.cap:
            do(ledger, "open", 0)
            do(ledger, "close", ns)
            paid, last = paid + ns, ns
            credit -= terms.pay * ns
        else:
            with pytest.raises(IllegalTransition):
                ledger.open()
        assert ledger.credit == credit
        assert ledger.funded == (credit == terms.cap)
        assert terms.pay * (paid - last) <= terms.earn * ordinary
        assert ledger.credit_ns * terms.pay <= credit
