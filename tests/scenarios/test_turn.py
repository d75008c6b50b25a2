"""A stream whose proposals were hopeless for long, and then are always right: probes find out, paid from ordinary
work."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flare.machines.selection.view import Reason

from .bench import Bench, Client, Played
from .catalogs import ALL

HOPELESS = 200
PROBES_MAX = 3


def turning(bench: Bench) -> tuple[Client, float]:
    """A stream of hopeless proposals, and when the output came after which all are right."""
    client = bench.arrive(64, 20_000, accepted=lambda outputs: 7 if outputs >= HOPELESS else 0)
    bench.run(lambda: client.tokens > HOPELESS)
    return client, bench.now_ms


def offers(frame: Played) -> bool:
    """Whether it is a round wider than one."""
    return frame.shape.width > 1


@pytest.mark.parametrize("policy", ["balanced", "throughput"])
def test_after_a_turn_few_probes_make_wide_rounds_ordinary_again(policy: str) -> None:
    bench = Bench(ALL, policy=policy)
    client, turn_ms = turning(bench)
    before = [frame for frame in bench.frames if frame.plan.reason is Reason.ORDINARY][-20:]
    assert not any(map(offers, before)), "hopeless proposals are given up"

    bench.run(lambda: any(f.at_ms > turn_ms and f.plan.reason is Reason.ORDINARY and offers(f) for f in bench.frames))
    after = [frame for frame in bench.frames if frame.at_ms > turn_ms]
    probes = [frame for frame in after if frame.plan.reason is Reason.ACCEPTANCE_PROBE]
    assert 1 <= len(probes) <= PROBES_MAX
    assert all(map(offers, probes))

    frames = bench.run_for(1_000)
    rounds = [frame for frame in frames if frame.plan.reason is Reason.ORDINARY]
    assert all(map(offers, rounds[len(rounds) // 2 :])), "and stay so"
    assert not client.error


def test_every_probe_was_paid_for_in_full() -> None:
    """Each is committed while the ledger is full, and the next one not before it is full again."""
    bench = Bench(ALL)
    _, turn_ms = turning(bench)
    bench.run_for(4_000)
    probes = [frame for frame in bench.frames if frame.plan.reason is Reason.ACCEPTANCE_PROBE]
    assert [frame for frame in probes if frame.at_ms > turn_ms]
    opened = [at_ms for at_ms, state, _ in bench.probe_ledger if state == "open"]
    assert opened == [frame.at_ms for frame in probes]
    for at_ms in opened:
        funded = [credit_ns for ms, state, credit_ns in bench.probe_ledger if ms <= at_ms and state == "funded"]
        assert funded
        assert funded[-1] == 5_000_000
    for earlier, later in pairwise(opened):
        between = [state for ms, state, _ in bench.probe_ledger if earlier < ms <= later]
        assert "funded" in between
