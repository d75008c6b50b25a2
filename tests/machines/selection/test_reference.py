"""Reference intervals, normalizers and the one-graph score against the reference numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flare.machines.graph import GraphKind
from flare.machines.ids import RequestHandle
from flare.machines.selection.board import Board
from flare.machines.selection.cohort import rank
from flare.machines.selection.interval import reference_interval
from flare.machines.selection.lanes import terms
from flare.machines.selection.reference import normalizers
from flare.machines.selection.select import select
from flare.machines.selection.view import Phase
from tests.machines.build import (
    decode_shape,
    decoder,
    graph,
    mixed_shape,
    prefill_shape,
    prompt,
    scored_shape,
    speculative_shape,
    stage_shape,
    terminal,
    view,
)

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())


@pytest.mark.parametrize("case", VECTORS["reference_interval"])
def test_reference_interval_matches_the_reference(case: dict[str, Any]) -> None:
    duration_ms, batch = zip(*case["graphs_ms_batch"], strict=True)
    got = reference_interval(np.array(duration_ms), np.array(batch), case["family"], case["streams"])
    assert got == pytest.approx(case["expect_ms"], rel=1e-12)


def test_unknown_graphs_have_no_part_in_the_reference_interval() -> None:
    assert reference_interval(np.array([0.0, 8.0]), np.array([8, 2]), 4, 4) == 4 * 8.0 / 2
    assert reference_interval(np.array([0.0]), np.array([8]), 4, 4) is None
    assert reference_interval(np.array([8.0]), np.array([8]), 0, 0) is None


@pytest.mark.parametrize("case", VECTORS["single_stage"])
def test_one_graph_scores_as_the_reference(case: dict[str, Any]) -> None:
    rows = case["decoders"]
    duration_ms, served = case["duration_ms"], min(case["batch"], len(rows))
    best = rank(
        np.array([[row["priced_service"] for row in rows]]),
        np.array([row["age_price"] * row["sigma_ms"] for row in rows]),
        np.array([row["age_ms"] for row in rows]),
        duration_ms,
    )
    priced = terms(
        np.array([duration_ms]),
        best.service[:, served],
        best.aged[:, served] + best.urgency[:, served] * duration_ms,
        sum(row["age_price"] for row in rows),
        served=np.array([served]),
        eligible=np.array([True]),
    )
    assert priced.score[0] == pytest.approx(case["expect_score"], rel=1e-12)
    assert sorted(rows[lane]["id"] for lane in best.order[0, :served]) == sorted(case["expect_cohort"])


def test_normalizers_are_the_fastest_expected_service() -> None:
    graphs = [
        graph(decode_shape(1), 8.0),
        graph(decode_shape(4), 10.0, stale=True),
        graph(decode_shape(8)),
        graph(prefill_shape(64), 20.0),
        graph(prefill_shape(256), 40.0),
        graph(scored_shape(64)),
    ]
    rows = [
        decoder(0),
        decoder(1),
        decoder(2, output_left=0),
        prompt(3, 64),
        prompt(4, 500, boundary=200),
        prompt(5, 64, phase=Phase.SCORED_PREFILL),
    ]
    found = normalizers(Board.of(view(graphs, rows)))
    assert found == {
        # Two streams: batch one gives 8/1 ms a delivery, batch four 10/2.
        RequestHandle(0, 1): (1 / 8.0, 2 * 10.0 / 2),
        RequestHandle(1, 2): (1 / 8.0, 2 * 10.0 / 2),
        RequestHandle(2, 3): (None, None),
        # 64 prompt tokens and the output token that ends the prompt.
        RequestHandle(3, 4): (65 / 20.0, None),
        RequestHandle(4, 5): (200 / 40.0, None),
        RequestHandle(5, 6): (None, None),
    }


def test_every_family_has_its_own_reference_interval() -> None:
    graphs = [
        graph(decode_shape(2), 10.0),
        graph(speculative_shape(4, 3), 16.0),
        graph(mixed_shape(4, 64), 14.0),
        graph(stage_shape(GraphKind.RESTORE, 1), 3.0),
        graph(stage_shape(GraphKind.RESTORE, 4), 4.0),
        graph(stage_shape(GraphKind.VISION, 1), 5.0),
        graph(stage_shape(GraphKind.SNAPSHOT, 1), 6.0),
        graph(stage_shape(GraphKind.TERMINAL_SNAPSHOT, 2), 9.0),
    ]
    rows = [
        decoder(0, survival=(0.75, 0.5)),
        decoder(1, survival=(0.5,)),
        decoder(2, stages=(GraphKind.RESTORE, GraphKind.VISION, GraphKind.VISION)),
        prompt(3, 64, stages=(GraphKind.RESTORE,)),
        terminal(4),
        terminal(5),
        decoder(6, stages=(GraphKind.RESUME,)),
    ]
    measured = normalizers(Board.of(view(graphs, rows)))
    found = [measured[RequestHandle(row.slot, row.generation)] for row in rows]
    assert found == [
        # Six wait: four streams and two that ended. Two are ready: the best round costs each of them 10/2.
        (2.25 / 16, 6 * 10.0 / 2),
        (1 / 10.0, 6 * 10.0 / 2),
        # Two need a restore (4/2 < 3/1), one its vision; four streams in all have their delivery from mixed/b4 at 14/4.
        (1 / 10.0, 6 * (4.0 + 5.0 + 5.0 + 14.0)),
        (65 / 14.0, None),
        (None, 6 * 9.0 / 2),
        (None, 6 * 9.0 / 2),
        # No resume graph is measured.
        (1 / 10.0, None),
    ]


def test_an_unset_token_price_is_the_newcomers() -> None:
    graphs = [graph(decode_shape(1), 4.0), graph(prefill_shape(64), 16.0)]
    unset = view(graphs, [decoder(0, token_price=None), prompt(1, 63, token_price=None)])
    # nu * N / r with nu = 8, N = 2; r is 1/4 for the decoder, 64/16 for the prompt with its output token.
    stated = view(graphs, [decoder(0, token_price=8 * 2 * 4.0), prompt(1, 63, token_price=8 * 2 / 4.0)])
    assert [c.score for c in select(unset, explain=True).candidates] == [
        c.score for c in select(stated, explain=True).candidates
    ]


def test_with_nothing_measured_an_unset_price_is_worth_nothing() -> None:
    plan = select(view([graph(prefill_shape(64))], [prompt(0, 64, token_price=None)])).plan
    assert plan is not None
    assert plan.score == 64 * 1.0 + 64.0
