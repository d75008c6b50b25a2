"""Prompts that arrive together at time 0, with speculation: first outputs come soon, and then evenly, for every number
of accepted drafts, whether acceptance is known or has to be learned."""

from __future__ import annotations

from typing import Any

import pytest

from flare.machines.graph import QUEUEABLE_KINDS

from .bench import Bench, Costs
from .catalogs import ALL, PLAIN, PREFILL, RETIRE, ROUNDS, STARTUP

CRITERION = STARTUP["criterion"]
SLOTS = 16
ENDLESS = 4_000


def name(case: dict[str, Any]) -> str:
    return f"{case['requests']}-{case['accepted_drafts']}-{case['acceptance']}"


MODES: dict[str, Costs] = {
    "ordinary": {**PLAIN, **RETIRE},
    "fixed:4": {**PREFILL, **RETIRE, **{shape: ms for shape, ms in ROUNDS.items() if shape.width == 4}},
    "fixed:8": {**PREFILL, **RETIRE, **{shape: ms for shape, ms in ROUNDS.items() if shape.width == 8}},
    "adaptive": ALL,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", STARTUP["cases"], ids=name)
def test_prompts_that_arrive_together_start_soon_and_go_on_evenly(case: dict[str, Any], mode: str) -> None:
    bench = Bench(MODES[mode], slots=SLOTS, keeps_prefixes=mode.startswith("fixed"))
    seeded = case["acceptance"] == "preseeded"
    clients = [
        bench.arrive(
            case["prompt_tokens"], ENDLESS, accepted=case["accepted_drafts"], seeded=seeded and mode != "ordinary"
        )
        for _ in range(case["requests"])
    ]
    bench.run(lambda: all(client.outputs for client in clients))
    before, played = [client.tokens for client in clients], len(bench.frames)

    def rounds() -> int:
        done = [frame for frame in bench.frames[played:] if frame.end_ms is not None]
        return sum(frame.kind in QUEUEABLE_KINDS for frame in done)

    bench.run(lambda: rounds() == CRITERION["rounds_after"])
    progress = [client.tokens - count for client, count in zip(clients, before, strict=True)]
    assert max(client.first_ms for client in clients) < CRITERION["first_output_ms"]
    assert max(gap for client in clients for gap in client.gaps_ms) < CRITERION["gap_ms"]
    assert min(progress) > 0
    assert max(progress) - min(progress) <= CRITERION["spread_tokens"]
