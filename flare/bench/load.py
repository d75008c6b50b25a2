"""How load is made.

Owns when requests are sent: closed loop, open loop, and running streams among which long prompts arrive. Does not own
prompts, records or numbers. Surprising rule: an open loop never waits for answers; a server that cannot keep up sees
its queue grow, as it would in service.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from .stats import MixedSummary, summarize_mixed
from .stream import Record

Generate = Callable[[str], Awaitable[Record]]
"""Sends one prompt and gives its record."""

_PAUSE_S = 0.1
"""What a running stream waits after a failure, so that a dead server is not asked without end."""


async def closed_loop(generate: Generate, prompts: Sequence[str], streams: int) -> list[Record]:
    """`streams` clients, each of which sends the next prompt as soon as its last answer is whole."""
    waiting = iter(prompts)
    records: list[Record] = []

    async def client() -> None:
        for prompt in waiting:
            records.append(await generate(prompt))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(client())
    return records


async def open_loop(generate: Generate, prompts: Sequence[str], rate: float, seed: int) -> list[Record]:
    """Sends `prompts` at `rate` requests/s, with exponential times between them (Poisson arrivals) from `seed`."""
    times = random.Random(seed)
    start, due = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt in prompts:
            due += times.expovariate(rate)
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(group.create_task(_collect(generate, prompt)))
    return [task.result() for task in tasks]


async def mixed(
    generate: Generate,
    prompts: Iterator[str],
    long_prompts: Sequence[str],
    *,
    streams: int,
    alone_s: float,
    every_s: float,
) -> MixedSummary:
    """`streams` clients run all the time, `alone_s` seconds by themselves, then with a long prompt every `every_s`.

    The crowded part ends `every_s` after the last long prompt was sent, or with its answer, if that is later.
    """
    records: list[Record] = []
    ended = asyncio.Event()

    async def client() -> None:
        while not ended.is_set():
            record = await generate(next(prompts))
            records.append(record)
            if record.error is not None:
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(client())
        started_ns = time.perf_counter_ns()
        await asyncio.sleep(alone_s)
        crowded_ns = time.perf_counter_ns()
        longs = []
        for index, prompt in enumerate(long_prompts):
            await asyncio.sleep(max(0.0, crowded_ns / 1e9 + index * every_s - time.perf_counter()))
            longs.append(group.create_task(_collect(generate, prompt)))
        await asyncio.sleep(every_s)
        await asyncio.wait(longs)
        ended_ns = time.perf_counter_ns()
        ended.set()
    return summarize_mixed(records, [task.result() for task in longs], (started_ns, crowded_ns), (crowded_ns, ended_ns))


async def _collect(generate: Generate, prompt: str) -> Record:
    return await generate(prompt)
