"""Streams without prompts: which widths acceptance earns, whom rounds serve together, padding, and two frames in
flight."""

from __future__ import annotations

import itertools

import pytest

from flare.machines.graph import GraphShape
from flare.machines.selection.view import Reason
from tests.machines.build import decode_shape, prefill_shape, speculative_shape

from .bench import Bench, Client, Costs, Played
from .catalogs import ALL, DECODE, PLAIN, ROUNDS

PROMPT: Costs = {prefill_shape(64): 3.75}


def ordinary(frames: list[Played]) -> list[Played]:
    """Without those that probe for acceptance: one part in a hundred of the time."""
    return [frame for frame in frames if frame.plan.reason is not Reason.ACCEPTANCE_PROBE]


def shapes(frames: list[Played]) -> set[GraphShape]:
    return {frame.shape for frame in frames}


def produced(clients: list[Client], frames: list[Played]) -> list[int]:
    """Output tokens that the committed `frames` brought to each client so far."""
    start_ms = frames[0].at_ms
    return [sum(output.tokens for output in client.outputs if output.at_ms > start_ms) for client in clients]


@pytest.mark.parametrize("accepted", [0, 1, 3, 7])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_known_acceptance_earns_the_width_with_the_most_tokens_per_ms(accepted: int, count: int) -> None:
    """All streams alike: of the batches that hold all of them exactly, the best width, in every ordinary frame."""
    bench = Bench(ALL)
    bench.decoding(count, accepted=accepted, seeded=True)
    frames = ordinary(bench.run_for(500))
    rounds = {shape: ms for shape, ms in {**DECODE, **ROUNDS}.items() if shape.batch == count}
    best = max(rounds, key=lambda shape: min(shape.width, accepted + 1) / rounds[shape])
    assert shapes(frames) == {best}
    assert all(len(frame.slots) == count for frame in frames)


@pytest.mark.parametrize(("accepted", "width"), [(0, 1), (1, 2), (3, 4)])
def test_acceptance_is_learned(accepted: int, width: int) -> None:
    """From the prior, low acceptance leads to plain decoding and high acceptance to wide rounds."""
    bench = Bench(ALL)
    clients = bench.decoding(4, accepted=accepted)
    bench.run_for(200)
    assert speculative_shape(4, 4) in shapes(bench.frames), "the prior's choice is tried"
    frames = bench.run_for(500)
    assert {shape.width for shape in shapes(ordinary(frames))} == {width}
    assert len(set(produced(clients, frames))) == 1


def test_rounds_serve_those_whose_proposals_are_accepted() -> None:
    """Four streams accept everything and four nothing. Wide rounds of eight cost twice those of four here, so that
    wide rounds serve the first four alone, and plain decoding everybody."""
    wide, all_wide, plain = speculative_shape(4, 4), speculative_shape(8, 4), decode_shape(8)
    bench = Bench({decode_shape(4): 7.95, plain: 8.4, wide: 10.0, all_wide: 20.0, **PROMPT})
    high = [bench.arrive(64, 20_000, accepted=3, seeded=True) for _ in range(4)]
    low = [bench.arrive(64, 20_000, accepted=0, seeded=True) for _ in range(4)]
    bench.run_for(500)
    frames = bench.run_for(2_000)
    assert shapes(frames) == {wide, plain}
    for frame in frames:
        assert frame.slots == tuple(client.slot for client in (high if frame.shape == wide else high + low))
    counts = produced(high + low, frames)
    assert min(counts[:4]) > 2 * max(counts[4:]) > 0


def test_streams_of_different_lengths_share_rounds_to_their_ends() -> None:
    """A lane's targets are cut to the output that is left; nobody gets a token too many."""
    bench = Bench(ALL)
    clients = [bench.arrive(64, tokens, accepted=7, seeded=True) for tokens in (1, 2, 7, 8, 9, 50, 51, 120)]
    bench.run()
    assert all(client.complete for client in clients)
    assert all(client.retired_ms is not None for client in clients)
    assert any(len({lane.tokens for lane in frame.plan.lanes}) > 1 for frame in bench.frames)


@pytest.mark.parametrize(
    ("costs_ms", "batch"),
    [
        ({1: 7.5, 2: 7.65, 4: 7.95, 8: 5.0}, 4),
        ({1: 7.5, 2: 8.0, 4: 11.0, 8: 12.0}, 4),
        ({1: 7.5, 2: 8.0, 4: 12.5, 8: 13.0}, 2),
        ({1: 7.5, 2: 8.0, 4: 30.0, 8: 31.0}, 2),
    ],
)
def test_padded_batches_compete_with_smaller_ones(costs_ms: dict[int, float], batch: int) -> None:
    """Three streams: a batch of four with an empty row, or two of them at a time, by tokens/ms (3/T4 against 2/T2).
    A batch of eight, however fast, is never used: one of four does the same."""
    bench = Bench({**{decode_shape(rows): ms for rows, ms in costs_ms.items()}, **PROMPT})
    clients = bench.decoding(3)
    bench.run_for(500)
    frames = bench.run_for(1_000)
    assert shapes(frames) == {decode_shape(batch)}
    served = [sum(client.slot in frame.slots for frame in frames) for client in clients]
    assert max(served) - min(served) <= 1


def test_long_runs_of_decoding_keep_two_frames_in_flight() -> None:
    """Every frame but the first waits behind the one before it, the device is never idle, and the last tokens are the
    last: no frame is submitted for output that queued work will bring."""
    bench = Bench(PLAIN)
    clients = [bench.arrive(64, 200) for _ in range(4)]
    bench.run()
    rounds = [frame for frame in bench.frames if frame.shape == decode_shape(4)]
    assert [frame.behind for frame in rounds] == [0] + [1] * 198
    for before, after in itertools.pairwise(rounds):
        assert before.end_ms is not None
        assert after.end_ms == pytest.approx(before.end_ms + PLAIN[after.shape])
    assert all(client.complete for client in clients)


def test_streams_that_need_feedback_keep_one() -> None:
    bench = Bench(PLAIN)
    clients = [bench.arrive(64, 50, needs_feedback=True) for _ in range(4)]
    bench.run()
    assert {frame.behind for frame in bench.frames} == {0}
    assert all(client.complete for client in clients)
