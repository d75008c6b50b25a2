"""How fast a device replays: periods and gaps of decode frames, and what lies around a single one.

Owns the measurements on a player. Does not own the comparison of devices. Surprising rule: gaps are told from the time
between completions on the host and the card's own durations, since all that a gap holds (copies, launches, waits)
is paid for by whoever waits for tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flare.graphs.frames import Completion
from flare.machines.graph import GraphKind, GraphShape

from .player import Player, Text, prompt_of
from .report import Finding, judged

CONTEXT = 128
IDLE_MOST = 0.05
"""Share of a period that the card may stand idle between two decode frames that are queued."""


class Pace(NamedTuple):
    """Of decode frames: from one to the next, and the card's own time."""

    period_ms: float
    device_ms: float

    @property
    def idle(self) -> float:
        """Share of a period that the card does not compute."""
        return max(0.0, 1.0 - self.device_ms / self.period_ms)


def rounds_of(player: Player) -> list[GraphShape]:
    """The player's graphs of one token for each row, by their rows."""
    kinds = (GraphKind.DECODE, GraphKind.SPECULATIVE)
    return sorted((s for s in player.catalog if s.kind in kinds and s.width == 1), key=lambda shape: shape.batch)


def prompts_of(player: Player, tokens: int) -> GraphShape:
    """Its smallest prefill graph that takes so many tokens, else its largest."""
    graphs = sorted((s for s in player.catalog if s.kind is GraphKind.PREFILL), key=lambda shape: shape.prefill_tokens)
    return next((shape for shape in graphs if shape.prefill_tokens >= tokens), graphs[-1])


def decoding(player: Player, rows: int, context: int, vocab: int, *, limit: int) -> list[Text]:
    """Requests that have consumed prompts of `context` tokens."""
    texts = [player.admit(slot, prompt_of(context, slot, vocab), limit=limit) for slot in range(rows)]
    player.read(texts, prompts_of(player, context))
    return texts


def pace(player: Player, shape: GraphShape, vocab: int, *, frames: int, in_flight: int) -> Pace:
    """Decode frames of a full graph, so many in flight at a time."""
    texts = decoding(player, shape.batch, CONTEXT, vocab, limit=frames + 8)
    at, device, queued = list[int](), list[int](), 0
    last: Completion | None = None
    for _ in range(frames):
        while queued < in_flight:
            player.submit(shape, [text.turn(ahead=queued) for text in texts])
            queued += 1
        last, now_ns = player.wait()
        at.append(now_ns)
        device.append(last.device_ns)
        _count(texts, last)
        queued -= 1
    for _ in range(queued):
        _count(texts, player.wait()[0])
    warm = frames // 4
    period_ns = (at[-1] - at[warm]) / (len(at) - 1 - warm)
    return Pace(period_ns / 1e6, statistics.fmean(device[warm + 1 :]) / 1e6)


def _count(texts: Sequence[Text], completion: Completion) -> None:
    for text, result in zip(texts, completion.results, strict=True):
        text.committed = result.committed


def around_a_frame(player: Player, vocab: int, *, frames: int) -> Iterator[Finding]:
    """What lies between submitting a frame to an idle card and its completion on an event loop, but for the graph."""
    shape = rounds_of(player)[0]
    texts = decoding(player, shape.batch, CONTEXT, vocab, limit=frames + 1)
    submits, overheads, hops = asyncio.run(_one_by_one(player, shape, texts, frames))
    for what, values in (
        ("submit, on the loop's thread", submits),
        ("submit to the waiter's thread, less the graph", overheads),
        ("waiter's thread to the loop", hops),
    ):
        p50, p99 = statistics.median(values) / 1e3, statistics.quantiles(values, n=100)[98] / 1e3
        yield Finding("latency", what, f"median {p50:.0f} us, p99 {p99:.0f} us")


async def _one_by_one(
    player: Player, shape: GraphShape, texts: Sequence[Text], frames: int
) -> tuple[list[int], list[int], list[int]]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Completion, int]]
    submits, overheads, hops = list[int](), list[int](), list[int]()

    def hand_over(completion: Completion, at_ns: int) -> None:
        loop.call_soon_threadsafe(lambda: done.set_result((completion, at_ns)))

    player.listener = hand_over
    try:
        for _ in range(frames):
            done = loop.create_future()
            began_ns = time.perf_counter_ns()
            player.submit(shape, [text.turn() for text in texts])
            submitted_ns = time.perf_counter_ns()
            completion, at_ns = await done
            hops.append(time.perf_counter_ns() - at_ns)
            submits.append(submitted_ns - began_ns)
            overheads.append(at_ns - began_ns - completion.device_ns)
            if completion.error is not None:
                raise RuntimeError(completion.error)
            _count(texts, completion)
    finally:
        player.listener = None
    return submits, overheads, hops


def paces(player: Player, vocab: int, *, frames: int, in_flight: int) -> dict[int, Pace]:
    """The pace at each number of streams."""
    return {shape.batch: pace(player, shape, vocab, frames=frames, in_flight=in_flight) for shape in rounds_of(player)}


def compared(queued: dict[int, Pace], alone: dict[int, Pace], eager: dict[int, Pace]) -> Iterator[Finding]:
    """Rows for each number of streams: rates, idle time, graphs against eager, two frames in flight against one."""
    for streams, two in queued.items():
        one, by_kernel = alone[streams], eager[streams]
        rate = streams / two.period_ms * 1e3
        value = f"{rate:.0f} tokens/s, {two.period_ms:.2f} ms, {two.device_ms:.2f} of it the graph"
        yield Finding("streams", f"{streams}: graphs, two in flight", value)
        yield Finding(
            "streams", f"{streams}: one in flight, against two", f"{one.period_ms / two.period_ms:.2f} x period"
        )
        what, times = f"{streams}: eager, against graphs", by_kernel.period_ms / two.period_ms
        if streams == 1:
            yield judged("streams", what, times, "x period", least=1.5)
        else:
            yield Finding("streams", what, f"{times:.2f} x period")
        yield judged("idle", f"{streams}: of the period of queued decodes", 100 * two.idle, "%", most=100 * IDLE_MOST)
