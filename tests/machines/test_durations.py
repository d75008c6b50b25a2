"""Duration estimates against the reference numbers, and the rules of freshness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.machines.durations import DurationTable
from tests.machines.build import decode_shape, prefill_shape

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())
TTL_NS = 30_000_000_000


@pytest.mark.parametrize("samples", VECTORS["duration"])
def test_estimates_match_the_reference(samples: list[dict[str, int]]) -> None:
    shape = decode_shape(4)
    table = DurationTable([shape], TTL_NS)
    for sample in samples:
        table.observe(shape, sample["sample_ns"], sample["now_ns"])
        assert table.row(shape, sample["now_ns"]).duration_ns == sample["expect_ns"]


def test_a_graph_starts_unknown_and_is_not_stale() -> None:
    shapes = [decode_shape(1), prefill_shape(64)]
    table = DurationTable(shapes, TTL_NS)
    rows = table.rows(TTL_NS * 100)
    assert all(
        (row.duration_ns, row.observed_at_ns, row.attempted_at_ns, row.stale) == (0, 0, 0, False) for row in rows
    )


def test_stale_only_after_more_than_the_time_to_live() -> None:
    shape = decode_shape(1)
    table = DurationTable([shape], TTL_NS)
    table.observe(shape, 5, 100)
    assert not table.row(shape, 100 + TTL_NS).stale
    assert table.row(shape, 101 + TTL_NS).stale
    assert table.row(shape, 101 + TTL_NS).duration_ns == 5


def test_the_sample_that_replaces_a_stale_estimate_starts_a_new_window() -> None:
    shape = decode_shape(1)
    table = DurationTable([shape], TTL_NS)
    for at_ns, sample in enumerate((10, 12, 14)):
        table.observe(shape, sample, at_ns)
    late = 10 * TTL_NS
    table.observe(shape, 100, late)
    assert table.row(shape, late).duration_ns == 100
    table.observe(shape, 201, late + 1)
    assert table.row(shape, late + 1).duration_ns == 150


def test_a_missing_sample_neither_changes_nor_freshens() -> None:
    shape = decode_shape(1)
    table = DurationTable([shape], TTL_NS)
    table.observe(shape, 9, 0)
    table.observe(shape, 0, TTL_NS)
    row = table.row(shape, TTL_NS + 1)
    assert (row.duration_ns, row.observed_at_ns, row.stale) == (9, 0, True)


def test_an_attempt_is_noted_and_freshens_nothing() -> None:
    shape = decode_shape(1)
    table = DurationTable([shape], TTL_NS)
    table.observe(shape, 9, 1)
    table.attempt(shape, 2 * TTL_NS)
    row = table.row(shape, 2 * TTL_NS)
    assert (row.attempted_at_ns, row.observed_at_ns, row.stale) == (2 * TTL_NS, 1, True)


def test_each_graph_has_its_own_estimate() -> None:
    one, two = decode_shape(1), decode_shape(2)
    table = DurationTable([one, two], TTL_NS)
    table.observe(one, 9, 1)
    assert [row.duration_ns for row in table.rows(1)] == [9, 0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="estimate_ttl_ns"):
        DurationTable([], 0)
    with pytest.raises(KeyError):
        DurationTable([], 1).observe(decode_shape(1), 5, 5)
