"""Numbers from records with given times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.bench.runs import median_run
from flare.bench.stats import (
    MixedSummary,
    Spread,
    Summary,
    gaps_ns,
    percentile,
    spread,
    summarize,
    summarize_mixed,
    tokens_between,
)
from flare.bench.stream import Record

MS = 1_000_000


def record(sent_ms: int, *delivered_ms: int, tokens: int | None = None, error: str | None = None) -> Record:
    return Record(
        sent_ns=sent_ms * MS,
        ended_ns=(delivered_ms[-1] if delivered_ms else sent_ms) * MS,
        delivered_ns=[at * MS for at in delivered_ms],
        prompt_tokens=64,
        output_tokens=len(delivered_ms) if tokens is None else tokens,
        counted=True,
        error=error,
    )


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 1))
def test_percentiles_lie_between_the_neighbours_of_their_rank(values: list[float], share: float) -> None:
    values.sort()
    found = percentile(values, share)
    assert sum(1 for value in values if value <= found + 1e-6) >= share * (len(values) - 1)
    assert values[0] - 1e-6 <= found <= values[-1] + 1e-6


def test_percentiles_of_known_values() -> None:
    values = [float(value) for value in range(101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (50, 99, 100)
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert spread([]) == Spread(None, None, None)


def test_a_run_is_summarized() -> None:
    run = summarize(
        [
            record(0, 100, 110, 120, 160, tokens=4),
            record(160, 300, 1160, tokens=2),
            record(5, error="HTTP 500: no"),
        ]
    )
    assert (run.requests, run.failed, run.errors) == (3, 1, {"HTTP 500: no": 1})
    assert run.seconds == pytest.approx(1.16)
    assert (run.output_tokens, run.chunks) == (6, 6)
    assert run.output_tokens_per_s == pytest.approx(6 / 1.16)
    assert (run.first_token_ms.p50, run.first_token_ms.max) == (120, 140)
    assert (run.gap_ms.p50, run.gap_ms.max) == (25, 860)
    assert run.first_token_ms.p99 == pytest.approx(139.6)
    assert run.gap_ms.p99 == pytest.approx(860 - 820 * 0.03)
    assert run.prompt_tokens == 128
    assert run.counted_by_usage


def test_a_run_in_which_all_failed_has_no_times() -> None:
    run = summarize([record(0, error="x"), record(1, error="x")])
    assert (run.failed, run.output_tokens, run.first_token_ms, run.errors) == (2, 0, Spread(None, None, None), {"x": 2})


def test_gaps_belong_to_the_interval_in_which_they_end() -> None:
    records = [record(0, 10, 20, 50), record(0, 15)]
    assert gaps_ns(records) == [10 * MS, 30 * MS]
    assert gaps_ns(records, after_ns=20 * MS) == [30 * MS]
    assert gaps_ns(records, until_ns=20 * MS) == [10 * MS]


def test_tokens_are_spread_over_their_chunks() -> None:
    assert tokens_between([record(0, 10, 20, 30, 40, tokens=8)], 10 * MS, 30 * MS) == 4


def test_a_mixed_run_is_told_in_its_two_parts() -> None:
    streams = [record(0, 100, 200, 300, 400, 1400, 1500), record(0, 100, 200), record(0, error="x")]
    longs = [record(400, 1300), record(1000, 2400)]
    run = summarize_mixed(streams, longs, (0, 400 * MS), (400 * MS, 2400 * MS))
    assert run.alone_tokens_per_s == pytest.approx(6 / 0.4)
    assert run.stream_tokens_per_s == pytest.approx(2 / 2.0)
    assert (run.gap_ms.p50, run.gap_ms.max) == (550, 1000)
    assert (run.long_first_token_ms.p50, run.long_first_token_ms.max) == (1150, 1400)
    assert (run.long_requests, run.failed, run.errors) == (2, 1, {"x": 1})


def test_the_median_run_is_one_of_the_runs() -> None:
    fast, slow, middle = (summarize([record(0, end, tokens=10)]) for end in (100, 900, 500))
    assert median_run([fast, slow, middle]) is middle
    assert median_run([fast, slow]) is slow
    assert isinstance(middle, Summary)
    calm, rough, rougher = (
        summarize_mixed([record(0, 1, 1 + gap)], [], (0, MS), (MS, 9999 * MS)) for gap in (10, 200, 900)
    )
    assert median_run([rougher, calm, rough]) is rough
    assert isinstance(rough, MixedSummary)
