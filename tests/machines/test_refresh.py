"""The refresh ledger in the scheduler: who earns, who pays, and when credit is lost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import CancelRequest, Effect, LedgerMoved, SubmitFrame
from flare.machines.ledger import REFRESH, Ledger, LedgerState
from flare.machines.selection.view import Plan, Reason

from .rig import MS, SMALL_DECODE, TTL_NS, Rig, decode

FULL_MS = 2_495


def as_reason(plan: Plan, reason: Reason) -> Plan:
    return replace(plan, reason=reason, needs_empty_window=True)


def ledger(rig: Rig) -> Ledger:
    return rig.scheduler.ledgers.by_reason[Reason.TIMING_REFRESH]


def moves(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(effect.before, effect.after) for effect in effects if isinstance(effect, LedgerMoved)]


def funded() -> Rig:
    """A rig with a decoding request, full credit, and a stale small decode graph."""
    rig = Rig()
    rig.decoding(1, max_tokens=64)
    while not ledger(rig).funded:
        work(rig, 300)
    rig.now_ns += TTL_NS
    work(rig, 10)
    assert rig.scheduler.durations.row(SMALL_DECODE, rig.now_ns).stale
    assert rig.scheduler.view(rig.now_ns).refresh_funded
    return rig


def work(rig: Rig, device_ms: float) -> list[Effect]:
    rig.commit(decode(rig.scheduler.residents[0]))
    return rig.complete(after_ms=device_ms, device_ms=device_ms)


def refresh(rig: Rig) -> None:
    rig.commit(as_reason(decode(rig.scheduler.residents[0], shape=SMALL_DECODE), Reason.TIMING_REFRESH))


def test_ordinary_service_earns_the_greater_of_wall_and_device_time_alone_in_the_window() -> None:
    rig = Rig()
    first, second = rig.decoding(2)
    before = ledger(rig).credit
    rig.commit(decode(first))
    rig.complete(after_ms=14, device_ms=10)
    assert ledger(rig).credit - before == 2 * 14 * MS
    rig.commit(decode(first))
    rig.commit(decode(second))
    before = ledger(rig).credit
    rig.complete(after_ms=10)
    rig.complete(after_ms=30, device_ms=11)
    assert ledger(rig).credit - before == 2 * (10 + 11) * MS


@pytest.mark.parametrize("why", ["untimed", "failed", "discovery"])
def test_what_earns_nothing(why: str) -> None:
    rig = Rig()
    first, _ = rig.decoding(2)
    before = ledger(rig).credit
    plan = decode(first)
    rig.commit(as_reason(plan, Reason.DISCOVERY) if why == "discovery" else plan)
    rig.complete(after_ms=10, device_ms=0 if why == "untimed" else 10, error="broken" if why == "failed" else None)
    assert ledger(rig).credit == before


@pytest.mark.parametrize(
    ("device_ms", "error", "paid_ms"), [(7, None, 7), (0, None, 9), (0, "broken", 9), (4, "broken", 4)]
)
def test_an_episode_pays_its_device_time_or_else_its_wall_time(
    device_ms: float, error: str | None, paid_ms: int
) -> None:
    """Whatever came of it. Only a valid observation makes the graph fresh."""
    rig = funded()
    effects = rig.scheduler.commit(
        as_reason(decode(rig.scheduler.residents[0], shape=SMALL_DECODE), Reason.TIMING_REFRESH),
        rig.scheduler.board(rig.now_ns),
        rig.now_ns,
    )
    assert moves(effects) == [("funded", "open")]
    (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
    assert submit.credit_ns == 5 * MS
    assert not rig.scheduler.view(rig.now_ns).refresh_funded
    effects = rig.complete(after_ms=9, device_ms=device_ms, error=error)
    assert moves(effects)[0] == ("open", "debt" if paid_ms > 5 else "earning")
    assert rig.scheduler.durations.row(SMALL_DECODE, rig.now_ns).stale == (error is not None or device_ms == 0)
    if error is None:
        assert ledger(rig).credit == REFRESH.cap - 998 * paid_ms * MS


def test_a_cancelled_episode_closes_too() -> None:
    rig = funded()
    refresh(rig)
    rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
    rig.complete(after_ms=9, device_ms=6)
    assert ledger(rig).state is LedgerState.DEBT
    assert ledger(rig).credit == REFRESH.cap - 998 * 6 * MS


def test_debt_is_worked_off_and_another_episode_needs_full_credit() -> None:
    rig = funded()
    refresh(rig)
    rig.complete(after_ms=6, device_ms=6)
    assert ledger(rig).credit_ns == -1 * MS
    rig.now_ns += TTL_NS
    work(rig, 300)
    with pytest.raises(CommitRefused, match="a refresh of decode/b1 is not due, or not paid for"):
        refresh(rig)
    states = [ledger(rig).state]
    work(rig, 300)
    states.append(ledger(rig).state)
    assert states == [LedgerState.DEBT, LedgerState.EARNING]


def test_idle_drops_what_is_positive_and_keeps_what_is_owed() -> None:
    rig = funded()
    effects = rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
    assert moves(effects) == [("funded", "idle")]
    assert ledger(rig).credit == 0
    rig = funded()
    refresh(rig)
    rig.complete(after_ms=6, device_ms=6)
    rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
    assert ledger(rig).credit_ns == -1 * MS


def test_a_frame_in_flight_is_not_idle() -> None:
    rig = funded()
    rig.commit(decode(rig.scheduler.residents[0]))
    rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
    assert ledger(rig).state is LedgerState.FUNDED
    assert ("funded", "idle") in moves(rig.complete(after_ms=10))


@pytest.mark.parametrize("why", ["fresh", "unfunded"])
def test_a_refresh_that_is_not_due_is_refused(why: str) -> None:
    """Freshness and credit are checked again at commit."""
    rig = funded() if why == "fresh" else Rig()
    if why == "fresh":
        rig.commit(decode(rig.scheduler.residents[0], shape=SMALL_DECODE))
        rig.complete(after_ms=5)
    else:
        rig.decoding(1, max_tokens=64)
        rig.now_ns += TTL_NS + 1
    with pytest.raises(CommitRefused, match="a refresh of decode/b1 is not due"):
        refresh(rig)


def test_the_first_refresh_needs_2495_ms() -> None:
    rig = Rig()
    (request,) = rig.decoding(1, max_tokens=64)
    while ledger(rig).credit + 2 * 300 * MS < REFRESH.cap:
        work(rig, 300)
    earned_ms = ledger(rig).credit / 2 / MS
    assert not ledger(rig).funded
    work(rig, FULL_MS - earned_ms)
    assert ledger(rig).funded and request.runnable
