"""Prompts and streams that want the same device: chunk sizes, and how long streams may be silent."""

from __future__ import annotations

import itertools
import math

import pytest

from flare.machines.graph import GraphKind
from flare.machines.selection.view import Phase, View
from tests.machines.build import BALANCED, decode_shape, prefill_shape

from .bench import Bench, Client, Played
from .catalogs import DECODE, PLAIN


def chunks(frames: list[Played]) -> list[int]:
    """Tokens of each prefill frame."""
    return [frame.prompt_tokens for frame in frames if frame.kind is GraphKind.PREFILL]


def longest_gap_ms(clients: list[Client], since_ms: float) -> float:
    """The longest silence of any of them that ended after `since_ms`."""
    return max(
        after.at_ms - before.at_ms
        for client in clients
        for before, after in zip(client.outputs, client.outputs[1:], strict=False)
        if after.at_ms > since_ms
    )


def decode_worth(view: View) -> tuple[float, float, int]:
    """Of all streams in one decode frame: the part of its service that prices make, the rest, and their number."""
    rows = [row for row in view.requests if row.phase is Phase.DECODE and row.output_left > 0]
    priced = sum(
        BALANCED.token_fairness * (row.token_price or 0.0) + BALANCED.delivery_fairness * (row.delivery_price or 0.0)
        for row in rows
    )
    return priced, len(rows) * BALANCED.output_token_value, len(rows)


def silence_ms(chunks: list[Played]) -> float:
    """How long after the first of `chunks` streams must have grown to be worth more than any of them.

    Unserved, prices grow with exp(t/adaptation). Ages only add to that.
    """
    priced, rest, streams = decode_worth(chunks[0].view)
    ms = next(ms for shape, ms in DECODE.items() if shape.batch >= streams)
    score = max(frame.plan.score for frame in chunks) + ms / 2 * BALANCED.decode_age_price * streams
    return 100.0 * math.log(max(1.0, (score * ms - rest) / priced))


@pytest.mark.parametrize(("streams", "prompts"), [(1, 1), (4, 1), (4, 4), (14, 2)])
def test_the_prices_of_silent_streams_interrupt_prefill(streams: int, prompts: int) -> None:
    """A row of chunks ends no later than streams are worth more by arithmetic, plus the chunk that runs then. All
    prompts and streams are served."""
    bench = Bench(PLAIN)
    running = bench.decoding(streams)
    bench.run_for(200)
    start_ms, played = bench.now_ms, len(bench.frames)
    waiting = [bench.arrive(20_000, 2, at_ms=start_ms) for _ in range(prompts)]
    bench.run(lambda: all(client.ended_ms is not None for client in waiting))
    frames = bench.frames[played:]
    assert sum(chunks(frames)) == prompts * 20_000
    bounds = []
    for prefill, grouped in itertools.groupby(frames, lambda frame: frame.kind is GraphKind.PREFILL):
        if prefill:
            row = list(grouped)
            bounds.append(silence_ms(row))
            assert row[-1].at_ms - row[0].at_ms <= bounds[-1]
    assert len(bounds) >= 3
    longest_chunk = max(PLAIN[frame.shape] for frame in frames)
    assert longest_gap_ms(running, start_ms) <= max(bounds) + longest_chunk + 2 * max(DECODE.values())


@pytest.mark.parametrize(("price", "largest"), [(0.0, 2_048), (0.1, 2_048), (1.0, 1_024)])
def test_waiting_streams_make_chunks_smaller_near_the_knee(price: float, largest: int) -> None:
    """2,048 tokens at once are 3% faster than 1,024; for that, eight streams would wait twice as long."""
    bench = Bench(PLAIN, decode_age_price=price)
    bench.decoding(8)
    bench.run_for(200)
    played = len(bench.frames)
    client = bench.arrive(20_000, 2, at_ms=bench.now_ms)
    bench.run(lambda: client.ended_ms is not None)
    assert max(chunks(bench.frames[played:])) == largest


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """It arrives last and is answered while the long one is in prefill."""
    bench = Bench(PLAIN)
    bench.decoding(4)
    long = bench.arrive(20_000, 2, at_ms=bench.now_ms)
    bench.run_for(50)
    short = bench.arrive(64, 2, at_ms=bench.now_ms)
    bench.run(lambda: bool(long.outputs))
    assert short.first_ms < 2 * (24.75 + 7.95)
    assert short.ended_ms is not None
    assert short.ended_ms < long.outputs[0].at_ms


@pytest.mark.parametrize("streams", [5, 6, 7, 12, 16])
def test_output_gaps_of_more_streams_than_rows(streams: int) -> None:
    """They take turns: nobody waits for more than all the others' turns, whole frames in between."""
    bench = Bench({decode_shape(1): 7.5, decode_shape(2): 7.65, decode_shape(4): 7.95, prefill_shape(64): 3.75})
    clients = bench.decoding(streams)
    bench.run_for(500)
    start_ms = bench.now_ms
    frames = bench.run_for(1_000)
    assert {frame.shape for frame in frames} == {decode_shape(4)}
    assert longest_gap_ms(clients, start_ms) <= math.ceil(streams / 4) * 7.95 + 1e-6


def test_a_stream_that_was_left_out_comes_first() -> None:
    """Its age grows with its silence, and so does its worth: of two streams alike, the older one has the turn."""
    bench = Bench({decode_shape(1): 7.5, prefill_shape(64): 3.75})
    bench.decoding(3)
    bench.run_for(300)
    for frame in bench.run_for(300):
        ages = {row.slot: row.age_ms for row in frame.view.requests}
        assert ages[frame.slots[0]] == max(ages.values())
