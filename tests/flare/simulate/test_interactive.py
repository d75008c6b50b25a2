"""The preset `interactive` in virtual time: short prompts first, and no long one for ever behind them."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from flare.config.loader import load_policy
from flare.config.schema import Policy
from flare.graphs.sim.costs import Curve
from flare.machines.graph import GraphKind, GraphShape
from flare.simulate.arrivals import OpenLoop
from flare.simulate.outcome import Outcome
from flare.simulate.serving import VirtualServer
from tests.flare.simulate.worlds import flat_costs, request

FRAME_S = 0.012
LONG, SHORT = 128, 64
SECONDS = 34
"""How long short prompts keep coming, as fast as they can be served."""


def long_prompt(policy: Policy) -> Outcome:
    """What becomes of a long prompt before an endless line of short ones, some of which wait at every moment."""
    load = [request(0.0, LONG, 1, "long"), *(request(0.0, SHORT, 1, "short") for _ in range(3))]
    load += [request(FRAME_S * place, SHORT, 1, "short") for place in range(round(SECONDS / FRAME_S))]
    server = VirtualServer(
        OpenLoop(load),
        policy,
        (GraphShape(GraphKind.PREFILL, 1, SHORT), GraphShape(GraphKind.DECODE, 1)),
        replace(flat_costs(), prefill_curve=Curve({0.0: 1000.0 * FRAME_S})),
        slots=4,
        kv_tokens=1600,
    )
    return server.run(until_ns=SECONDS * 10**9)[0]


def test_a_long_prompt_is_served_however_many_short_ones_come() -> None:
    policy = load_policy("interactive")
    outcome = long_prompt(policy)
    # A token of what is left is worth as much as one of a short prompt once the value has grown LONG/SHORT times.
    due_ms = policy.first_output_growth_ms * (LONG / SHORT - 1)
    assert outcome.tokens, "never served"
    assert 0.9 * due_ms < outcome.tokens[0] / 1e6 < 1.1 * due_ms


def test_without_growth_it_would_wait_for_ever() -> None:
    assert not long_prompt(msgspec.structs.replace(load_policy("interactive"), first_output_growth_ms=0.0)).tokens
