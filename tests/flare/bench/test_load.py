"""How load is made, with a generator of records in place of a server."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from flare.bench.load import closed_loop, mixed, open_loop
from flare.bench.prompts import PromptMaker, text
from flare.bench.runs import endless
from flare.bench.stream import Record
from tests.flare.sse_server import count_tokens


class Sender:
    """Takes prompts, and answers each after two turns of the loop."""

    def __init__(self, error: str | None = None) -> None:
        self.prompts: list[str] = []
        self.error = error
        self.active = self.active_max = 0

    async def __call__(self, prompt: str) -> Record:
        self.prompts.append(prompt)
        self.active += 1
        self.active_max = max(self.active_max, self.active)
        await asyncio.sleep(0.001)
        self.active -= 1
        return Record(sent_ns=len(self.prompts), ended_ns=len(self.prompts), error=self.error)


@pytest.mark.asyncio
async def test_a_closed_loop_sends_every_prompt_once_with_all_streams_busy() -> None:
    sender = Sender()
    prompts = [f"p{number}" for number in range(20)]
    records = await closed_loop(sender, prompts, streams=4)
    assert sender.prompts == prompts
    assert len(records) == 20
    assert sender.active_max == 4


@pytest.mark.asyncio
async def test_an_open_loop_does_not_wait_for_answers() -> None:
    gate = asyncio.Event()
    begun: list[str] = []

    async def never_before_all_are_sent(prompt: str) -> Record:
        begun.append(prompt)
        if len(begun) == 30:
            gate.set()
        await gate.wait()
        return Record(sent_ns=len(begun))

    prompts = [f"p{number}" for number in range(30)]
    records = await open_loop(never_before_all_are_sent, prompts, rate=2000, seed=1)
    assert begun == prompts
    assert len(records) == 30


@pytest.mark.asyncio
async def test_long_prompts_arrive_among_running_streams() -> None:
    sender = Sender()
    short = (f"s{number}" for number in itertools.count())
    run = await mixed(sender, short, ["long1", "long2", "long3"], streams=3, alone_s=0.05, every_s=0.02)
    assert [prompt for prompt in sender.prompts if prompt.startswith("long")] == ["long1", "long2", "long3"]
    assert sender.active_max == 4
    assert sender.prompts.index("long1") >= 3
    assert (run.long_requests, run.failed) == (3, 0)


@pytest.mark.asyncio
async def test_streams_whose_server_died_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.bench.load._PAUSE_S", 0.5)
    sender = Sender(error="dead")
    run = await mixed(sender, itertools.repeat("s"), ["long"], streams=2, alone_s=0.05, every_s=0.05)
    assert run.failed == len(sender.prompts) < 20


async def count(prompt: str) -> int:
    return count_tokens(prompt)


@pytest.mark.asyncio
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 64, 512, 1500])
async def test_prompts_are_distinct_and_of_the_size_that_the_server_counts(tokens: int) -> None:
    maker = PromptMaker(7, count)
    prompts = [await maker.make(tokens) for _ in range(10)]
    sizes = [count_tokens(prompt) for prompt in prompts]
    assert all(tokens - 1 <= size <= max(tokens, 1) for size in sizes), sizes
    assert sum(size == tokens for size in sizes) >= 5
    if tokens > 2:
        assert len({prompt[:20] for prompt in prompts}) == 10


@pytest.mark.asyncio
async def test_prompts_come_from_their_seed_alone() -> None:
    first, again, other = PromptMaker(1, None), PromptMaker(1, None), PromptMaker(2, None)
    assert await first.make(40) == await again.make(40) != await other.make(40)
    assert len((await first.make(40)).split()) == 40


def test_text_looks_like_english() -> None:
    words = text(random.Random(3), 300)
    assert words[0][0].isupper()
    assert words[-1].endswith(".")
    for before, after in itertools.pairwise(words):
        assert before.endswith(".") == after[0].isupper()


def test_endless_prompts_begin_with_the_pool_and_never_repeat() -> None:
    pool = [" ".join(text(random.Random(seed), 40)) for seed in range(3)]
    prompts = list(itertools.islice(endless(pool, 5), 200))
    assert prompts[:3] == pool
    assert len(set(prompts)) == 200
    assert all(len(prompt.split()) == 40 for prompt in prompts)
