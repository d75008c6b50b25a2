"""The engine with graphs beyond prefill and decode: retirement through a snapshot, rounds and mixed frames."""

from __future__ import annotations

import anyio
import pytest

from flare.engine.stream import Stream
from flare.graphs.sim.acceptance import FixedAcceptance
from flare.graphs.sim.timing import Fault, Faults, by_kind
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence
from flare.machines.lifecycle import RequestState
from flare.machines.request import EndReason
from flare.request import Delta
from tests.flare.engine.harness import CATALOG, Rig, collect, request, running

pytestmark = pytest.mark.asyncio

RETIRING = (*CATALOG, *(GraphShape(GraphKind.TERMINAL_SNAPSHOT, batch) for batch in (1, 4)))
ROUNDS = tuple(rectangular(GraphKind.SPECULATIVE, batch, width) for batch in (1, 4) for width in (1, 4))
MIXED = (GraphShape(GraphKind.MIXED, 4, 16, 1), GraphShape(GraphKind.MIXED, 8, 16, 4))


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def plain(prompt: str, max_tokens: int, **more: object) -> list[Delta]:
    """What a server without the further kinds answers."""
    async with running() as rig:
        (stream,) = rig.engine.submit([request(prompt, max_tokens, **more)])
        return await collect(stream)


async def read(stream: Stream, into: list[Delta]) -> None:
    async for delta in stream:
        into.append(delta)


async def retiring(rig: Rig) -> None:
    """Wait until a request's output is complete and its snapshot is not."""

    def waits() -> bool:
        return any(request.state is RequestState.RETIRING for request in rig.scheduler.residents)

    with anyio.fail_after(5):
        while not waits():  # noqa: ASYNC110 - the scheduler is pure and signals nobody
            await anyio.sleep(0.001)


async def test_the_finish_comes_with_the_snapshot_and_the_text_before_it() -> None:
    """All text is visible while the terminal snapshot runs; the response completes when it is done."""
    slow = by_kind(dict.fromkeys(GraphKind, 500_000) | {GraphKind.TERMINAL_SNAPSHOT: 1_000_000_000})
    expected = await plain("hello", 3)
    async with running(catalog=RETIRING, duration=slow) as rig:
        (stream,) = rig.engine.submit([request("hello", 3)])
        seen: list[Delta] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, stream, seen)
            await retiring(rig)
            await anyio.wait_all_tasks_blocked()
            assert (text(seen), seen[-1].finish_reason) == (text(expected), None)
        last = seen[-1]
        assert (last.text, last.finish_reason, last.completion_tokens) == ("", EndReason.LENGTH, 3)
        await rig.settled()
        assert rig.metrics.executions("terminal_snapshot/b1") + rig.metrics.executions("terminal_snapshot/b4") == 1


@pytest.mark.parametrize("ending", ["eos", "token", "string", "length"])
async def test_every_end_is_told_as_without_retirement(ending: str) -> None:
    whole = text(await plain("same prompt", 12))
    more: dict[str, object] = {}
    if ending == "token":
        more = {"stop_token_ids": (ord(whole[4]),)}
    if ending == "string":
        more = {"stop": (whole[3:5],)}
    expected = await plain("same prompt", 12, **more)
    async with running(catalog=RETIRING) as rig:
        (stream,) = rig.engine.submit([request("same prompt", 12, **more)])
        deltas = await collect(stream)
        await rig.settled()
    assert text(deltas) == text(expected)
    ends = [(d[-1].finish_reason, d[-1].stop_reason, d[-1].completion_tokens) for d in (deltas, expected)]
    assert ends[0] == ends[1]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


async def test_a_scored_prompt_keeps_its_scores() -> None:
    expected = await plain("hello there", 0, prompt_logprobs=1)
    async with running(catalog=RETIRING) as rig:
        (stream,) = rig.engine.submit([request("hello there", 0, prompt_logprobs=1)])
        deltas = await collect(stream)
        await rig.settled()
    assert [d.prompt_scores for d in deltas if d.prompt_scores] == [
        d.prompt_scores for d in expected if d.prompt_scores
    ]
    assert deltas[-1].finish_reason is EndReason.LENGTH


async def test_a_failed_terminal_snapshot_does_not_spoil_the_answer() -> None:
    """Frame 1 is the prompt, 2 and 3 the decode steps, and 4 the snapshot."""
    expected = await plain("hello", 3)
    async with running(catalog=RETIRING, faults=Faults({Fence(4): Fault.FAILED})) as rig:
        (stream,) = rig.engine.submit([request("hello", 3)])
        deltas = await collect(stream)
        await rig.settled()
        assert (text(deltas), deltas[-1].finish_reason) == (text(expected), EndReason.LENGTH)
        assert rig.metrics.executions("terminal_snapshot/b1") + rig.metrics.executions("terminal_snapshot/b4") == 0


async def test_a_client_that_leaves_before_the_snapshot_leaves_nothing_behind() -> None:
    slow = by_kind(dict.fromkeys(GraphKind, 500_000) | {GraphKind.TERMINAL_SNAPSHOT: 200_000_000})
    async with running(catalog=RETIRING, duration=slow) as rig:
        (stream,) = rig.engine.submit([request("hello", 3)])
        await retiring(rig)
        stream.cancel()
        await rig.settled()


@pytest.mark.parametrize("catalog", [(*CATALOG[3:], *ROUNDS), (*CATALOG, *MIXED), (*RETIRING, *ROUNDS, *MIXED)])
async def test_the_text_does_not_depend_on_the_kinds_that_make_it(catalog: tuple[GraphShape, ...]) -> None:
    prompts = [("same", 20), ("another prompt, longer", 13), ("x", 1), ("and a last one", 30)]
    expected = [text(await plain(*prompt)) for prompt in prompts]
    async with running(catalog=catalog, acceptance=FixedAcceptance(2)) as rig:
        for _ in range(3):
            streams = rig.engine.submit([request(*prompt) for prompt in prompts])
            seen: list[list[Delta]] = [[] for _ in streams]
            async with anyio.create_task_group() as tasks:
                for stream, into in zip(streams, seen, strict=True):
                    tasks.start_soon(read, stream, into)
            assert [text(deltas) for deltas in seen] == expected
        await rig.settled()
