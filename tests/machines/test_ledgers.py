"""Both ledgers in the scheduler: what earns for both, what one alone pays, and both bounds whatever happens."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from flare.machines.commitment import CommitRefused
from flare.machines.events import CancelRequest, Effect, LedgerMoved, SubmitFrame
from flare.machines.graph import GraphShape
from flare.machines.ledger import PROBE, REFRESH, Terms
from flare.machines.selection.view import Plan, Reason

from .rig import CATALOG, MS, ROUND, SMALL_DECODE, TTL_NS, UPKEEP, Rig, decode, decode_lane, plan_of

WIDE = (*CATALOG, ROUND)
REFRESHING, PROBING = Reason.TIMING_REFRESH, Reason.ACCEPTANCE_PROBE
TERMS = {REFRESHING: REFRESH, PROBING: PROBE}


def credit(rig: Rig, reason: Reason) -> int:
    return rig.scheduler.ledgers.by_reason[reason].credit


def funded(rig: Rig, reason: Reason) -> bool:
    return rig.scheduler.ledgers.funded(reason)


def episode(rig: Rig, reason: Reason) -> Plan:
    """A probe with a wide round, or a refresh of the small decode graph."""
    (request,) = rig.scheduler.residents
    plan = decode(request, shape=SMALL_DECODE) if reason is REFRESHING else plan_of(ROUND, decode_lane(request, 2))
    return replace(plan, reason=reason)


def work(rig: Rig, ms: float) -> list[Effect]:
    rig.commit(decode(rig.scheduler.residents[0]))
    return rig.complete(after_ms=ms, device_ms=ms)


def busy(reason: Reason | None = None) -> Rig:
    """A rig with one decoding request; the ledger of `reason` is full."""
    rig = Rig(catalog=WIDE)
    rig.decoding(1, max_tokens=200)
    while reason is not None and not funded(rig, reason):
        work(rig, 100)
    return rig


def moves(effects: list[Effect]) -> list[tuple[str, str, str, int]]:
    return [(e.ledger, e.before, e.after, e.credit_ns) for e in effects if isinstance(e, LedgerMoved)]


def test_ordinary_service_earns_for_both() -> None:
    rig = busy()
    before = {reason: credit(rig, reason) for reason in TERMS}
    work(rig, 10)
    earned = {reason: credit(rig, reason) - before[reason] for reason in TERMS}
    assert earned == {REFRESHING: 2 * 10 * MS, PROBING: 10 * MS}


@pytest.mark.parametrize(("reason", "needed_ns"), [(REFRESHING, 2_495 * MS), (PROBING, 495 * MS)])
def test_the_first_episode_needs_exactly_so_much_ordinary_service(reason: Reason, needed_ns: int) -> None:
    rig = busy()
    work_ns = needed_ns - credit(rig, reason) // TERMS[reason].earn - 1
    assert credit(rig, reason) % TERMS[reason].earn == 0
    work(rig, work_ns / MS)
    view = rig.scheduler.view(rig.now_ns)
    assert not (view.refresh_funded if reason is REFRESHING else view.probe_funded)
    with pytest.raises(CommitRefused, match="not paid for"):
        rig.commit(episode(rig, reason))
    work(rig, 1 / MS)
    view = rig.scheduler.view(rig.now_ns)
    assert view.refresh_funded if reason is REFRESHING else view.probe_funded
    if reason is REFRESHING:
        rig.now_ns += TTL_NS + 1
        work(rig, 1)
    rig.commit(episode(rig, reason))


@pytest.mark.parametrize(("device_ms", "error", "paid_ms"), [(7, None, 7), (0, None, 9), (4, "broken", 4)])
def test_a_probe_opens_and_closes_its_own_ledger_alone(device_ms: float, error: str | None, paid_ms: int) -> None:
    rig = busy(PROBING)
    before = credit(rig, REFRESHING)
    effects = rig.scheduler.commit(episode(rig, PROBING), rig.scheduler.board(rig.now_ns), rig.now_ns)
    assert moves(effects) == [("probe", "funded", "open", 5 * MS)]
    (submit,) = [effect for effect in effects if isinstance(effect, SubmitFrame)]
    assert submit.credit_ns == 5 * MS
    assert not rig.scheduler.view(rig.now_ns).probe_funded
    (first, *_) = moves(rig.complete(after_ms=9, device_ms=device_ms, error=error))
    assert first == ("probe", "open", "debt" if paid_ms > 5 else "earning", 5 * MS - paid_ms * MS)
    if error is None:
        assert (credit(rig, REFRESHING), credit(rig, PROBING)) == (before, PROBE.cap - 99 * paid_ms * MS)


def test_a_refresh_neither_pays_nor_earns_for_probes() -> None:
    rig = busy(REFRESHING)
    rig.now_ns += TTL_NS + 1
    work(rig, 10)
    assert funded(rig, PROBING)
    rig.scheduler.ledgers.by_reason[PROBING].rest()
    rig.commit(episode(rig, REFRESHING))
    rig.complete(after_ms=3, device_ms=3)
    assert (credit(rig, REFRESHING), credit(rig, PROBING)) == (REFRESH.cap - 998 * 3 * MS, 0)


def test_one_probe_at_a_time() -> None:
    """The second would be queued behind the first; ordinary work behind it earns for refreshes alone, since the
    probe's credit is full until it ends."""
    rig = busy(PROBING)
    rig.commit(episode(rig, PROBING))
    with pytest.raises(CommitRefused, match="a probe with speculative/b4d3w4 is not paid for"):
        rig.commit(episode(rig, PROBING))
    rig.commit(decode(rig.scheduler.residents[0]))
    before = credit(rig, REFRESHING)
    rig.complete(after_ms=6, device_ms=6)
    assert credit(rig, PROBING) == -99 * MS
    rig.complete(after_ms=10, device_ms=10)
    assert (credit(rig, PROBING), credit(rig, REFRESHING) - before) == (-99 * MS + 10 * MS, 20 * MS)


def test_idle_drops_what_is_positive_of_both() -> None:
    rig = busy(PROBING)
    rig.commit(episode(rig, PROBING))
    rig.complete(after_ms=6, device_ms=6)
    effects = rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
    assert ("refresh", "earning", "idle", 0) in moves(effects)
    assert (credit(rig, REFRESHING), credit(rig, PROBING)) == (0, -99 * MS)


@pytest.mark.parametrize("catalog", [CATALOG, (*CATALOG, UPKEEP)])
def test_where_nothing_is_proposed_nothing_is_probed(catalog: tuple[GraphShape, ...]) -> None:
    rig = Rig(catalog=catalog)
    rig.decoding(1, max_tokens=64)
    work(rig, 600)
    assert set(rig.scheduler.ledgers.by_reason) == {REFRESHING}
    assert not rig.scheduler.view(rig.now_ns).probe_funded


def test_fixed_selection_does_not_probe() -> None:
    rig = Rig(catalog=WIDE, keeps_prefixes=True)
    rig.decoding(1, max_tokens=64)
    work(rig, 600)
    view = rig.scheduler.view(rig.now_ns)
    assert view.keeps_prefixes and not view.probe_funded
    with pytest.raises(CommitRefused, match="not paid for"):
        rig.commit(episode(rig, PROBING))


class Sums:
    """What was earned and paid for each reason, told from the history alone."""

    def __init__(self) -> None:
        self.ordinary = 0
        self.paid, self.last = dict.fromkeys(TERMS, 0), dict.fromkeys(TERMS, 0)

    def pay(self, reason: Reason, ns: int) -> None:
        self.paid[reason] += ns
        self.last[reason] = ns

    def check(self, reason: Reason, terms: Terms) -> None:
        assert terms.pay * (self.paid[reason] - self.last[reason]) <= terms.earn * self.ordinary


@pytest.mark.parametrize("block", range(10))
def test_both_bounds_hold_after_every_event_of_a_thousand_histories(block: int) -> None:
    """A hundred in each block: work of all lengths, idle times, and episodes that are timed or not, fail, or lose their
    client, each against an account told from the history."""
    seen: set[object] = set()
    for seed in range(100 * block, 100 * block + 100):
        seen |= run_history(random.Random(seed))
    assert seen == {*TERMS, "idle", "untimed", "failed", "cancelled", "refused"}


def run_history(rng: random.Random) -> set[object]:
    rig, sums, seen = busy(), Sums(), set[object]()
    expected = {reason: credit(rig, reason) for reason in TERMS}
    sums.ordinary = expected[PROBING]
    for _ in range(12):
        if not rig.scheduler.residents:
            rig.decoding(1, max_tokens=200)
            sums.ordinary += credit(rig, PROBING) - expected[PROBING]
            expected = {reason: credit(rig, reason) for reason in TERMS}
        reason = rng.choice((Reason.ORDINARY, Reason.ORDINARY, Reason.ORDINARY, Reason.DISCOVERY, REFRESHING, PROBING))
        if reason is REFRESHING:
            rig.now_ns += TTL_NS + 1
        if reason in TERMS and expected[reason] != TERMS[reason].cap:
            seen.add("refused")
            with pytest.raises(CommitRefused):
                rig.commit(episode(rig, reason))
            continue
        plan = episode(rig, reason) if reason in TERMS else decode(rig.scheduler.residents[0])
        rig.commit(replace(plan, reason=reason))
        wall, device = rng.randint(1, 2_000 * MS), rng.choice((0, rng.randint(1, 2_000 * MS)))
        fate = rng.choice((None, None, None, "cancelled", "failed"))
        if fate == "cancelled":
            rig.scheduler.apply(CancelRequest(rig.scheduler.residents[0].id), rig.now_ns)
        records = () if fate is None else (rig.record(plan.lanes[0]),)
        rig.complete(*records, after_ms=wall / MS, device_ms=device / MS, error="broken" if fate == "failed" else None)
        if reason is Reason.ORDINARY and fate != "failed" and device:
            interval = max(wall, device)
            sums.ordinary += interval
            expected = {one: min(t.cap, expected[one] + t.earn * interval) for one, t in TERMS.items()}
        elif reason in TERMS:
            seen |= {reason, *([fate] if fate else []), *([] if device else ["untimed"])}
            sums.pay(reason, device or wall)
            expected[reason] -= TERMS[reason].pay * (device or wall)
        if not rig.scheduler.residents:
            seen.add("idle")
            expected = {one: min(0, owed) for one, owed in expected.items()}
        assert {one: credit(rig, one) for one in TERMS} == expected
        for one, terms in TERMS.items():
            sums.check(one, terms)
    return seen
