"""Requests of every kind together, cancelled and failing: each gets what it would get alone, and all is counted.

Owns a random load from a seed. Surprising rule: on the simulated device a request's tokens depend on its prompt and
settings alone, so that a run of each request by itself says what it must get among others.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import anyio
import pytest

from flare.explain import differences, logged_view
from flare.graphs.frames import Sampling
from flare.graphs.sim.timing import Fault, Faults
from flare.machines.ids import Fence
from flare.machines.selection.select import select
from flare.request import Delta, Endpoints, GenerationRequest
from flare.server.engine_api import RequestFailed
from flare.trace import open_trace
from flare.trace_reader import read_plans
from tests.flare.engine.harness import Rig, collect, request, running

REQUESTS = 24
CANCELLED, FAILED = "cancelled", "failed"


def draw(rng: random.Random) -> GenerationRequest:
    """Any mixture of what a request may ask for."""
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.choice((1, 2, 4, 5, 16, 17, 40))))
    scored = rng.random() < 0.25
    max_tokens = 0 if scored and rng.random() < 0.4 else rng.choice((1, 1, 2, 3, 8, 20))
    letters = "abcdefghijklmnopqrstuvwxyz"
    system_end = rng.choice((0, rng.randint(0, len(prompt))))
    return request(
        prompt,
        max_tokens,
        client=rng.choice("xyz"),
        sampling=Sampling(
            temperature=0.0,
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        ),
        endpoints=Endpoints(system_end, (system_end, len(prompt))),
        stop=tuple(rng.sample(letters, rng.choice((0, 0, 1, 3)))),
        min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))),
        ignore_eos=rng.random() < 0.2,
        logprobs=rng.choice((None, 0, 1)),
        prompt_logprobs=rng.choice((0, 2)) if scored else None,
    )


def end_at(prompt: int, consumed: int, index: int) -> bool:
    return (prompt * 31 + consumed + index) % 17 == 0


def summary(deltas: list[Delta]) -> object:
    """All that a client sees, however it was cut into deltas."""
    last = deltas[-1]
    text = "".join(delta.text for delta in deltas)
    tokens = [token for delta in deltas for token in delta.tokens]
    offsets = [offset for delta in deltas for offset in delta.offsets]
    prompt_scores = [delta.prompt_scores for delta in deltas if delta.prompt_scores is not None]
    return text, tokens, offsets, prompt_scores, last.completion_tokens, last.finish_reason, last.stop_reason


async def outcome(rig: Rig, asked: GenerationRequest, wait_s: float = 0.0, cancel_s: float | None = None) -> object:
    """What comes of a request that arrives after a while and may be cancelled some time later."""
    await anyio.sleep(wait_s)
    (stream,) = rig.engine.submit([asked])
    deltas: list[Delta] = []
    try:
        if cancel_s is None:
            deltas = await collect(stream)
        else:
            with anyio.move_on_after(cancel_s):
                deltas = await collect(stream)
    except RequestFailed:
        return FAILED
    finally:
        stream.cancel()
    return summary(deltas) if deltas else CANCELLED


async def mixture(rng: random.Random, asked: list[GenerationRequest], rig: Rig) -> list[object]:
    """The outcomes of all requests, run together."""
    outcomes: list[object] = [None] * len(asked)

    async def one(index: int) -> None:
        cancel_s = rng.random() * 0.04 if rng.random() < 0.3 else None
        outcomes[index] = await outcome(rig, asked[index], rng.random() * 0.03, cancel_s)

    async with anyio.create_task_group() as tasks:
        for index in range(len(asked)):
            tasks.start_soon(one, index)
    await rig.settled()
    return outcomes


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(6))
async def test_a_mixture(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    asked = [draw(rng) for _ in range(REQUESTS)]
    async with running(eos_at=end_at) as rig:
        alone = [await outcome(rig, each) for each in asked]
        await rig.settled()
    drawn = {Fence(fence): rng.random() for fence in range(1, 1000)}
    faults = {fence: Fault.FAILED if x < 0.01 else Fault.UNTIMED for fence, x in drawn.items() if x < 0.03}
    path = tmp_path / "trace.jsonl"
    trace = open_trace(path)
    assert trace is not None
    slots, pages = rng.choice((1, 2, 4)), rng.choice((10, 20, 64))
    async with running(slots=slots, pages=pages, eos_at=end_at, faults=Faults(faults), trace=trace) as rig:
        together = await mixture(rng, asked, rig)
        metrics, frames = rig.metrics.render().decode(), len(rig.device.frames)
    trace.close()
    assert all(got in (CANCELLED, FAILED, expected) for got, expected in zip(together, alone, strict=True))
    assert any(got == expected for got, expected in zip(together, alone, strict=True))
    ended = {
        reason: float(count) for reason, count in re.findall(r'success_total{finished_reason="(\w+)".* (\S+)', metrics)
    }
    assert sum(ended.values()) == REQUESTS
    assert ended["error"] == together.count(FAILED)
    assert ended["abort"] <= together.count(CANCELLED)
    plans = list(read_plans(path))
    assert len(plans) == frames
    assert [found for plan in plans if (found := differences(plan, select(logged_view(plan)).plan))] == []
