"""Whole measurements: warm-up, runs, and the one in the middle.

Owns what is measured, from a case to its result. Does not own how load is made or how results are shown. Surprising
rule: of several runs the result is the median one, whole, never a mixture of the best numbers of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from flare.client import first_model

from .http import HttpError, Server, fetch
from .load import Generate, closed_loop, mixed, open_loop
from .prompts import PromptMaker, find_tokenizer
from .stats import MixedSummary, Summary, summarize
from .stream import Ask, generate

OnStep = Callable[[str], None]
"""Told what is about to be done."""

_REQUESTS_PER_STREAM = 4
_REQUESTS_MIN = 8
_LONE_OUTPUT_TOKENS = 8
_OPEN_WARM_UP_STREAMS = 4
_POOL_PER_STREAM = 16


class BenchError(Exception):
    """Nothing can be measured; the message says why."""


class Case(msgspec.Struct, frozen=True):
    """What one run does. `rate` is in requests/s, for an open loop; `requests` None is four for each stream."""

    kind: Literal["closed", "open", "mixed"] = "closed"
    streams: int = 1
    requests: int | None = None
    prompt_tokens: int = 64
    output_tokens: int = 64
    rate: float = 0.0
    long_prompt_tokens: int = 1500
    long_count: int = 8
    every_s: float = 3.0
    alone_s: float = 10.0

    @property
    def count(self) -> int:
        """How many requests a closed or open loop sends."""
        return self.requests or max(_REQUESTS_MIN, _REQUESTS_PER_STREAM * self.streams)

    @property
    def name(self) -> str:
        """A short description."""
        if self.kind == "mixed":
            return f"{self.streams} streams, {self.long_prompt_tokens}-token prompt every {self.every_s:g} s"
        load = f"{self.rate:g} requests/s" if self.kind == "open" else f"{self.streams} stream"
        plural = "s" if self.kind == "closed" and self.streams != 1 else ""
        return f"{load}{plural}, {self.prompt_tokens}-token prompts"


class Result(msgspec.Struct, frozen=True):
    """A case, its median run (by output tokens/s; of mixed runs by the longest gap) and the numbers of all runs."""

    name: str
    case: Case
    median: Summary | MixedSummary
    runs: tuple[Summary | MixedSummary, ...]


SUITE = (
    *(Case(streams=streams) for streams in (1, 4, 8, 16)),
    Case(streams=8, requests=24, prompt_tokens=512),
    Case(requests=9, prompt_tokens=512, output_tokens=_LONE_OUTPUT_TOKENS),
    Case(kind="mixed", streams=4),
)
"""The table of docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A server, what is asked of it, and where prompts come from: all that the runs of one invocation share."""

    server: Server
    ask: Ask
    maker: PromptMaker
    seed: int

    async def measure(self, case: Case, repeat: int, on_step: OnStep) -> Result:
        """Warm up, run `case` `repeat` times and choose the median run."""
        on_step(f"{case.name}: warming up")
        await self._warm_up(case)
        runs: list[Summary | MixedSummary] = []
        for index in range(repeat):
            on_step(f"{case.name}: run {index + 1} of {repeat}")
            runs.append(await self._run(case, self.seed + index))
        return Result(case.name, case, median_run(runs), tuple(runs))

    async def _prompts(self, count: int, tokens: int) -> list[str]:
        return [await self.maker.make(tokens) for _ in range(count)]

    async def _warm_up(self, case: Case) -> None:
        streams = case.streams if case.kind != "open" else _OPEN_WARM_UP_STREAMS
        send = self._sender(case)
        records = await closed_loop(send, await self._prompts(2 * streams, case.prompt_tokens), streams)
        if case.kind == "mixed":
            records.append(await send(await self.maker.make(case.long_prompt_tokens)))
        if all(record.error is not None for record in records):
            raise BenchError(f"every request of the warm-up failed: {records[0].error}")

    async def _run(self, case: Case, seed: int) -> Summary | MixedSummary:
        send = self._sender(case)
        if case.kind == "mixed":
            pool = await self._prompts(_POOL_PER_STREAM * case.streams, case.prompt_tokens)
            longs = await self._prompts(case.long_count, case.long_prompt_tokens)
            return await mixed(
                send, endless(pool, seed), longs, streams=case.streams, alone_s=case.alone_s, every_s=case.every_s
            )
        prompts = await self._prompts(case.count, case.prompt_tokens)
        if case.kind == "open":
            return summarize(await open_loop(send, prompts, case.rate, seed))
        return summarize(await closed_loop(send, prompts, case.streams))

    def _sender(self, case: Case) -> Generate:
        return partial(generate, self.server, replace(self.ask, output_tokens=case.output_tokens))


async def open_bench(server: Server, ask: Ask, seed: int) -> Bench:
    """Look at the server: the model to ask for, where `ask` names none, and how it counts tokens.

    Raises `BenchError` when the server cannot be reached or lists no model.
    """
    if not ask.model:
        ask = replace(ask, model=await _first_model(server))
    return Bench(server, ask, PromptMaker(seed, await find_tokenizer(server, ask.model)), seed)


def endless(pool: Sequence[str], seed: int) -> Iterator[str]:
    """The prompts of `pool`, then the same words in ever new orders: near enough of the same size, and distinct."""
    yield from pool
    generator = random.Random(seed)
    while True:
        words = generator.choice(pool).split()
        generator.shuffle(words)
        yield " ".join(words)


def median_run(runs: Sequence[Summary | MixedSummary]) -> Summary | MixedSummary:
    """The run in the middle (the lower one of two), by output tokens/s or, of mixed runs, by the longest gap."""
    return sorted(runs, key=_rank)[(len(runs) - 1) // 2]


def _rank(run: Summary | MixedSummary) -> float:
    return run.output_tokens_per_s if isinstance(run, Summary) else run.gap_ms.max or 0.0


async def _first_model(server: Server) -> str:
    try:
        status, body = await fetch(server, "GET", "/v1/models")
        if status != 200:
            raise BenchError(f"/v1/models answered with HTTP {status}: {body[:200].decode(errors='replace')}")
        return first_model(body)
    except (HttpError, ValueError) as error:
        raise BenchError(str(error)) from error
