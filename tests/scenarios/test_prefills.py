"""Long prompts without anybody else: the chunks that they are cut into, and how several share the device."""

from __future__ import annotations

import itertools

import pytest

from flare.machines.graph import GraphKind
from flare.machines.selection.view import PolicyRow, RequestRow
from tests.machines.build import BALANCED, decode_shape, prefill_shape

from .bench import Bench, Costs, Played
from .catalogs import DECODE, PLAIN, PREFILL

LONG = 10_000
FASTEST = 2_048
"""The capacity with the most tokens/ms."""


def chunk_worth(row: RequestRow, policy: PolicyRow, tokens: int) -> float:
    """Priced service of a chunk (docs/scheduling.md, "Value")."""
    price = policy.token_fairness * (row.token_price or 0.0)
    ends = row.position + tokens == row.prompt_tokens
    return tokens * (1.0 + price) + ends * (policy.output_token_value + price)


def best_capacities(frame: Played, costs: Costs) -> set[int]:
    """The capacities that give most for their time, for the prompt that a frame serves; without those that a smaller
    one makes redundant."""
    row = next(row for row in frame.view.requests if row.slot == frame.slots[0])
    left, worth = row.prompt_tokens - row.position, dict[int, float]()
    for shape, ms in costs.items():
        capacity = shape.prefill_tokens
        if shape.kind is GraphKind.PREFILL and not any(left <= smaller < capacity for smaller in worth):
            worth[capacity] = chunk_worth(row, BALANCED, min(left, capacity)) / ms
    return {capacity for capacity, value in worth.items() if value == pytest.approx(max(worth.values()), rel=1e-12)}


def chunks(bench: Bench) -> list[tuple[int, int]]:
    """Capacity and tokens of every prefill frame."""
    frames = [frame for frame in bench.frames if frame.kind is GraphKind.PREFILL]
    return [(frame.shape.prefill_tokens, frame.prompt_tokens) for frame in frames]


@pytest.mark.parametrize("count", [1, 2, 16])
def test_long_prompts_share_the_device_chunk_by_chunk(count: int) -> None:
    bench = Bench(PLAIN)
    clients = [bench.arrive(LONG, 2) for _ in range(count)]
    bench.run()
    assert all(client.complete for client in clients)
    consumed = dict.fromkeys(range(count), 0)
    for frame in bench.frames:
        if frame.kind is not GraphKind.PREFILL:
            continue
        (slot,) = frame.slots
        assert frame.shape.prefill_tokens in best_capacities(frame, PLAIN)
        if LONG - consumed[slot] >= FASTEST:
            assert frame.prompt_tokens == FASTEST
        consumed[slot] += frame.prompt_tokens
        assert max(consumed.values()) - min(consumed.values()) <= FASTEST
    assert set(consumed.values()) == {LONG}


@pytest.mark.parametrize("count", [1, 2, 16])
def test_nothing_is_idle_while_prompts_wait(count: int) -> None:
    """The last first output comes after the durations of all frames until then."""
    bench = Bench(PLAIN)
    clients = [bench.arrive(LONG, 1) for _ in range(count)]
    bench.run()
    total_ms = sum(PLAIN[frame.shape] for frame in bench.frames)
    assert max(client.first_ms for client in clients) == pytest.approx(total_ms)
    for before, after in itertools.pairwise(bench.frames):
        assert after.at_ms == before.end_ms


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (64, [(64, 64)]),
        (65, [(128, 65)]),
        (70, [(128, 70)]),
        (129, [(128, 128), (64, 1)]),
        (200, [(256, 200)]),
        (300, [(256, 256), (64, 44)]),
        (2_048 + 64, [(2_048, 2_048), (64, 64)]),
        (2_048 + 70, [(2_048, 2_048), (128, 70)]),
        (4_096, [(2_048, 2_048), (2_048, 2_048)]),
    ],
)
def test_fitting_and_padded_tails(tokens: int, expected: list[tuple[int, int]]) -> None:
    """A tail that no capacity fits is padded or cut, whichever gives more for its time."""
    bench = Bench(PLAIN)
    bench.arrive(tokens, 1)
    bench.run()
    assert chunks(bench) == expected
    for frame in bench.frames:
        assert frame.shape.prefill_tokens in best_capacities(frame, PLAIN)


def test_a_tail_takes_the_only_capacity_there_is() -> None:
    """It earns its own tokens there, and is served all the same."""
    only = prefill_shape(4_096)
    bench = Bench({**DECODE, only: PREFILL[only]})
    client = bench.arrive(4_096 + 64, 1)
    bench.run()
    assert chunks(bench) == [(4_096, 4_096), (4_096, 64)]
    assert client.complete


@pytest.mark.parametrize("small_ms", [3.75, 30.0])
def test_no_measurement_makes_redundant_padding_the_better_choice(small_ms: float) -> None:
    """Fifty tokens go through the capacity of 64, though 128 is measured to be faster."""
    bench = Bench({decode_shape(1): 7.5, prefill_shape(64): small_ms, prefill_shape(128): 4.2})
    bench.arrive(50, 1)
    bench.run()
    assert chunks(bench) == [(64, 50)]
