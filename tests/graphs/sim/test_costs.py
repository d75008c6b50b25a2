"""Durations from a table of costs: its points, what lies between and beyond, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.graphs.frames import Frame, LaneInput
from flare.graphs.sim.costs import CostError, CostTable, load_costs
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.ids import Fence, RequestHandle

TABLE: dict[str, Any] = {
    "gpu": "test",
    "model": "tiny",
    "context_tokens": 1024,
    "kv_bytes_per_token": 1000,
    "decode": {"1": 6.0, "2": 7.0, "4": 8.0},
    "prefill": {"64": 10.0, "128": 14.0, "256": 24.0},
    "mixed": {"1": {"64": 11.0, "128": 15.0, "256": 25.0}, "4": {"64": 13.0, "128": 18.0, "256": 28.0}},
    "verify": {"2": {"1": 6.5, "2": 7.5, "4": 9.0}, "4": {"1": 7.5, "2": 8.5, "4": 12.0}},
    "decode_by_context": {"512": {"1": 5.0, "2": 5.5, "4": 6.0}, "2048": {"1": 8.0, "2": 10.0, "4": 12.0}},
    "prefill_with_past": {"1024": {"64": 11.0, "128": 16.0, "256": 28.0}},
    "snapshot": {"1": 2.0, "4": 3.0},
}


def written(folder: Path, table: object) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return path


@pytest.fixture
def costs(tmp_path: Path) -> CostTable:
    return load_costs(written(tmp_path, TABLE))


@pytest.fixture(scope="module")
def shared_costs(tmp_path_factory: pytest.TempPathFactory) -> CostTable:
    return load_costs(written(tmp_path_factory.mktemp("costs"), TABLE))


def test_points_of_the_table_come_back(costs: CostTable) -> None:
    for batch, ms in TABLE["decode"].items():
        assert costs.decode(int(batch), 1024) == ms
        assert costs.decode(int(batch), 2048) == TABLE["decode_by_context"]["2048"][batch]
    for tokens, ms in TABLE["prefill"].items():
        assert costs.prefill(int(tokens)) == ms
        assert costs.prefill(int(tokens), 1024) == pytest.approx(TABLE["prefill_with_past"]["1024"][tokens])
    for batch, row in TABLE["mixed"].items():
        for tokens, ms in row.items():
            assert costs.mixed(int(batch), 1024, int(tokens)) == pytest.approx(ms)
    assert costs.decode(2, 1024) + costs.speculation(2, 4, 3) == 8.5


def test_between_points_all_is_linear(costs: CostTable) -> None:
    assert costs.decode(3, 1024) == 7.5
    assert costs.decode(3, 1536) == pytest.approx((7.5 + 11.0) / 2)
    assert costs.prefill(96) == 12.0
    assert costs.prefill(96, 512) == pytest.approx(12.0 + (1.0 + 2.0) / 2 / 2)
    assert costs.mixed(2.5, 1024, 96) == pytest.approx((13.0 + 15.5) / 2)
    assert costs.decode(3, 1024) + costs.speculation(3, 3, 2) == pytest.approx((8.25 + 10.25) / 2)


def test_below_the_first_point_it_is_flat_and_beyond_the_last_the_slope_goes_on(costs: CostTable) -> None:
    assert costs.decode(1, 0) == 5.0
    assert costs.decode(8, 1024) == 10.0
    assert costs.decode(4, 4096) == 20.0
    assert costs.prefill(512) == 44.0
    assert costs.prefill(256, 2048) == pytest.approx(24.0 + 2 * 4.0)


def test_a_prompt_of_one_token_is_one_row_and_a_mixed_graph_begins_at_its_rows(costs: CostTable) -> None:
    assert costs.prefill(1) == 6.0
    assert costs.mixed(4, 1024, 0) == 8.0
    assert costs.mixed(4, 1024, 32) == pytest.approx((8.0 + 13.0) / 2)
    assert costs.mixed(0, 0, 128) == 14.0


def test_context_and_past_are_added_to_the_mixed_grid(costs: CostTable) -> None:
    assert costs.mixed(4, 2048, 64) == pytest.approx(13.0 + 4.0)
    assert costs.mixed(4, 1024, 128, [(128, 1024)]) == pytest.approx(18.0 + 2.0)
    assert costs.mixed(4, 1024, 128, [(64, 1024), (64, 0)]) == pytest.approx(18.0 + 1.0)


def test_a_mixed_graph_is_never_cheaper_than_either_part(costs: CostTable) -> None:
    assert costs.mixed(1, 0, 64) == 10.0
    assert costs.mixed(4, 0, 20_000) >= costs.prefill(20_000)


def test_a_prepared_graph_costs_its_capacity_and_reads_what_its_lanes_have(costs: CostTable) -> None:
    assert costs.graph(GraphShape(GraphKind.DECODE, 4), 4 * 1024) == 8.0
    assert costs.graph(GraphShape(GraphKind.DECODE, 4), 2048) == 6.0
    assert costs.graph(GraphShape(GraphKind.PREFILL, 1, 128), chunks=[(3, 0)]) == 14.0
    assert costs.graph(GraphShape(GraphKind.SCORED_PREFILL, 1, 128)) == 14.0
    mixed = GraphShape(GraphKind.MIXED, 2, 64, 1)
    assert costs.graph(mixed, 1024, [(10, 0)]) == pytest.approx(11.0)
    assert costs.graph(GraphShape(GraphKind.SNAPSHOT, 2)) == pytest.approx(2.0 + 1 / 3)


def test_speculation_adds_its_width_and_its_proposals(tmp_path: Path) -> None:
    shape = rectangular(GraphKind.SPECULATIVE, 4, 4)
    free = load_costs(written(tmp_path, TABLE))
    assert free.graph(shape, 4 * 1024) == 12.0
    priced = load_costs(written(tmp_path, TABLE | {"draft": {"1": 0.5}}))
    assert priced.graph(shape, 4 * 1024) == 12.0 + 3 * 0.5
    beside = rectangular(GraphKind.MIXED, 5, 4, 64, 1)
    assert free.graph(beside, 4 * 1024) == pytest.approx(13.0 + 4.0)


def test_a_frame_takes_whole_nanoseconds(costs: CostTable) -> None:
    lanes = [LaneInput(RequestHandle(slot, 1), 0, True) for slot in range(2)]
    prompt = LaneInput(RequestHandle(2, 1), 1024, False, np.zeros(64, np.int32), 0)
    contexts = {0: 1024, 1: 3072}
    duration = costs.duration(lambda lane: contexts[lane.handle.slot])
    assert duration(Frame(Fence(1), GraphShape(GraphKind.DECODE, 2), tuple(lanes))) == 10_000_000
    shape = GraphShape(GraphKind.MIXED, 5, 64, 1)
    assert duration(Frame(Fence(1), shape, (*lanes, prompt))) == round((13.0 + 1.0) * 1e6)


def test_a_byte_order_mark_is_no_part_of_the_table(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_costs(path).decode(1, 1024) == 6.0


def test_what_cannot_be_priced_is_found_before_the_run(costs: CostTable) -> None:
    costs.check([GraphShape(GraphKind.DECODE, 4), GraphShape(GraphKind.SNAPSHOT, 1)])
    with pytest.raises(CostError, match=r"restore is missing; give restore\[batch\] for graph restore/b2"):
        costs.check([GraphShape(GraphKind.RESTORE, 2)])


def test_speculation_needs_its_table(tmp_path: Path) -> None:
    costs = load_costs(written(tmp_path, {key: value for key, value in TABLE.items() if key != "verify"}))
    with pytest.raises(CostError, match="verify is missing"):
        costs.check([rectangular(GraphKind.SPECULATIVE, 2, 2)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"decode": None}, "decode: must be an object"),
        ({"decode": {"1": 6.0, "two": 7.0}}, r"decode\[two\]: its key must be a whole number"),
        ({"decode": {"0": 6.0}}, r"decode\[0\]"),
        ({"prefill": {"64": "10"}}, r"prefill\[64\]: '10' must be a number of milliseconds from"),
        ({"prefill": {"64": 10.0, "128": 9.0}}, r"prefill\[128\]: 9.0 ms is less than the 10.0 ms at 64"),
        ({"mixed": {"1": {"64": -1.0}}}, r"mixed\[1\]\[64\]: -1.0 must be"),
        ({"prefill": {"64": 1e12}}, r"prefill\[64\]: 1000000000000.0 must be a number of milliseconds from"),
        ({"prefill": {"64": 10**400}}, r"prefill\[64\]: 10{39} must be a number of milliseconds"),
        ({"prefill": {"²": 9.0}}, r"prefill\[²\]: its key must be a whole number"),
        ({"prefill": {"9" * 5000: 9.0}}, r"prefill\[9{40}\]: its key must be a whole number"),
        ({"decode_by_context": {"2048": {"1": 6.5, "64": 7.0}}}, r"decode_by_context\[2048\]\[2\]: .* ms of row 1024"),
        ({"decode_by_context": {"512": {"1": 6.5}}}, r"decode_by_context\[1024\]\[1\]: 6 ms is less than the 6.5 ms"),
        (
            {"prefill_with_past": {"64": {"64": 9.0}}},
            r"prefill_with_past\[64\]\[64\]: 9 ms is less than the 10 ms of row 0",
        ),
        ({"mixed": {"1": {"64": 11.0}, "4": {"64": 10.0}}}, r"mixed\[4\]\[64\]: 10 ms is less than the 11 ms of row 1"),
        ({"verify": {"2": {"1": 5.0}}}, r"verify\[2\]\[1\]: 5 ms is less than the 6 ms of row 1"),
        ({"mixed": {}}, "mixed: must be an object of tables"),
        ({"context_tokens": "many"}, "context_tokens: 'many' must be a number"),
    ],
)
def test_bad_values_name_the_key(tmp_path: Path, change: dict[str, object], told: str) -> None:
    with pytest.raises(CostError, match=told):
        load_costs(written(tmp_path, TABLE | change))


@pytest.mark.parametrize("key", ["decode", "prefill", "mixed"])
def test_missing_tables_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CostError, match=f"{key}: is missing; give"):
        load_costs(written(tmp_path, {name: value for name, value in TABLE.items() if name != key}))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read"):
        load_costs(tmp_path / "nothing.json")
    for text in ("{", "[" * 100_000):
        (tmp_path / "broken.json").write_text(text, encoding="utf-8")
        with pytest.raises(CostError, match="not valid JSON"):
            load_costs(tmp_path / "broken.json")
    with pytest.raises(CostError, match="must be an object with"):
        load_costs(written(tmp_path, [1]))


@given(
    batch=st.integers(1, 64),
    more=st.integers(0, 64),
    context=st.floats(0, 9000),
    longer=st.floats(0, 9000),
    tokens=st.integers(0, 9000),
    further=st.integers(0, 9000),
)
def test_more_work_never_takes_less_time(
    shared_costs: CostTable, batch: int, more: int, context: float, longer: float, tokens: int, further: int
) -> None:
    base = shared_costs.mixed(batch, context, tokens)
    for other in (
        shared_costs.mixed(batch + more, context, tokens),
        shared_costs.mixed(batch, context + longer, tokens),
        shared_costs.mixed(batch, context, tokens + further),
    ):
        assert other >= base * (1 - 1e-9)
