"""Flare's own server in virtual time: every token, the same each time, and by the product's own decisions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.config.loader import load_policy
from flare.graphs.sim.costs import Curve, Surface, load_costs
from flare.machines.graph import GraphKind, GraphShape
from flare.simulate.arrivals import OpenLoop
from flare.simulate.cells import jitter
from flare.simulate.outcome import Outcome
from flare.simulate.serving import VirtualServer
from flare.simulate.traces import TraceRequest
from tests.flare.simulate.worlds import costs_file, flat_costs, request

CATALOG = (
    *(GraphShape(GraphKind.DECODE, batch) for batch in (1, 2, 4)),
    *(GraphShape(GraphKind.PREFILL, 1, tokens) for tokens in (16, 64)),
    GraphShape(GraphKind.MIXED, 4, 32, 2),
)


def serve(
    requests: list[TraceRequest], policy: str = "balanced", *, slots: int = 4, kv_tokens: int = 400
) -> list[Outcome]:
    server = VirtualServer(
        OpenLoop(requests),
        load_policy(policy),
        CATALOG,
        flat_costs(),
        slots=slots,
        kv_tokens=kv_tokens,
        jitter=jitter(5, 0.1),
    )
    outcomes = server.run()
    assert server.scheduler.idle
    server.scheduler.check()
    return outcomes


@settings(max_examples=30, deadline=None)
@given(
    load=st.lists(
        st.tuples(st.floats(0, 1), st.integers(1, 150), st.integers(1, 20), st.sampled_from("ab")),
        min_size=1,
        max_size=12,
    ),
    policy=st.sampled_from(("balanced", "throughput", "interactive")),
    slots=st.integers(1, 4),
)
def test_everything_is_served_exactly_once(load: list[tuple[float, int, int, str]], policy: str, slots: int) -> None:
    outcomes = serve(sorted((request(*row) for row in load), key=lambda one: one.arrival_s), policy, slots=slots)
    for outcome in outcomes:
        assert outcome.finished and not outcome.refused
        assert len(outcome.tokens) == outcome.request.output_tokens
        assert sum(tokens for _, tokens in outcome.prompts) == outcome.request.prompt_tokens
        assert list(outcome.tokens) == sorted(set(outcome.tokens))
        assert outcome.tokens[0] >= outcome.prompts[-1][0] > outcome.arrival_ns


def test_the_same_load_gives_the_same_run() -> None:
    load = [request(0.01 * place, 20 + place, 6) for place in range(9)]
    assert [outcome.tokens for outcome in serve(load)] == [outcome.tokens for outcome in serve(load)]


def test_what_can_never_fit_is_refused() -> None:
    outcomes = serve([request(0.0, 500, 4), request(0.1, 20, 4), request(0.1, 10**12, 10**12)])
    assert [outcome.refused for outcome in outcomes] == [True, False, True]
    assert outcomes[1].finished


def test_a_run_can_end_early() -> None:
    server = VirtualServer(
        OpenLoop([request(0.0, 16, 50), request(10.0)]),
        load_policy("balanced"),
        CATALOG,
        flat_costs(),
        slots=2,
        kv_tokens=400,
    )
    first, second = server.run(until_ns=100_000_000)
    assert 0 < len(first.tokens) < 50 and max(first.tokens) < 100_000_000
    assert not second.tokens


def test_estimates_start_unknown_and_are_learned() -> None:
    server = VirtualServer(
        OpenLoop([request(0.0, 16, 40)]), load_policy("balanced"), CATALOG, flat_costs(7.0), slots=2, kv_tokens=400
    )
    assert all(row.duration_ns == 0 for row in server.scheduler.durations.rows(0))
    server.run()
    assert server.scheduler.durations.row(GraphShape(GraphKind.DECODE, 1), 0).duration_ns == 7_000_000


def test_durations_follow_the_context_of_the_rows(tmp_path: Path) -> None:
    costs = load_costs(costs_file(tmp_path))
    by_context = Surface({1.0: Curve({1.0: 1.0}), 1000.0: Curve({1.0: 1000.0})})
    longer = replace(costs, decode_grid=by_context)
    catalog, gaps = (GraphShape(GraphKind.DECODE, 1), GraphShape(GraphKind.PREFILL, 1, 64)), []
    for table in (costs, longer):
        server = VirtualServer(
            OpenLoop([request(0.0, 16, 60)]), load_policy("balanced"), catalog, table, slots=1, kv_tokens=400
        )
        (outcome,) = server.run()
        gaps.append([later - earlier for earlier, later in pairwise(outcome.tokens)])
    assert gaps[0] == [5_000_000] * 59
    # A millisecond for each token that the row has read and written, frames queued behind others among them.
    assert gaps[1] == [1_000_000 * (17 + place) for place in range(59)]


def test_a_failed_frame_is_no_quiet_loss() -> None:
    server = VirtualServer(
        OpenLoop([request(0.0, 16, 4)]), load_policy("balanced"), CATALOG, flat_costs(), slots=1, kv_tokens=400
    )
    server._core.prepare(())  # the device refuses every shape
    with pytest.raises(RuntimeError, match="the simulated device failed"):
        server.run()
