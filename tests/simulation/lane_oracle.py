"""What each lane of a submitted frame must be.

Owns the roles of lanes by kind of graph (docs/scheduling.md, "Graphs" and "Commit and completion"). Changes nothing.
Surprising rule: what a lane is expected to give is worked out from the row of the view that its plan was chosen from,
and what it may give from the account as it stands now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flare.machines.allocation import allocate
from flare.machines.events import Dispatch, SubmitFrame
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.selection.view import RequestRow, View

from .known import Known, Stage
from .normalizer_oracle import round_targets, round_tokens

if TYPE_CHECKING:
    from .oracle import Oracle

RETIRING_KINDS = (GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT)
PROMPT_KINDS = (GraphKind.PREFILL, GraphKind.MIXED)
STEP_KINDS = (GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED)


def check_lanes(oracle: Oracle, submit: SubmitFrame, view: View) -> None:
    """Raise AssertionError for a lane that breaks a rule of its graph."""
    shape, lanes = submit.plan.shape, submit.lanes
    assert 0 < len({lane.request for lane in lanes}) == len(lanes) <= shape.batch
    rows = {(row.slot, row.generation): row for row in view.requests}
    prompts, rounds = list[Dispatch](), list[Dispatch]()
    for lane in lanes:
        known, work = oracle.requests[lane.request], lane.work
        assert known.handle == (work.slot, work.generation)
        assert lane.pages == (None if known.bound else known.pages)
        if known.terminal:
            _check_retirement(known, lane, shape)
        elif known.stage is Stage.BLOCKED:
            _check_stage(known, lane, shape)
        elif known.stage is Stage.PROMPT:
            prompts.append(lane)
            _check_prompt(known, lane, shape)
        else:
            rounds.append(lane)
            _check_round(oracle, known, lane, shape, rows[work.slot, work.generation])
    drawn_from = [rows[lane.work.slot, lane.work.generation] for lane in rounds]
    _check_targets(shape, rounds, drawn_from, shared=submit.plan.allocates)
    assert sum(lane.work.tokens for lane in prompts) <= shape.prefill_tokens
    assert shape.kind is not GraphKind.MIXED or len(prompts) <= shape.prompt_rows


def _check_still(known: Known, lane: Dispatch) -> None:
    work = lane.work
    assert (work.start, work.tokens, work.emits, work.delivers) == (known.consumed, 0, False, False)
    assert work.expected_tokens == 0.0 and lane.stage is not None


def _check_retirement(known: Known, lane: Dispatch, shape: GraphShape) -> None:
    assert shape.kind in RETIRING_KINDS and lane.stage is not None
    _check_still(known, lane)
    row = known.state_row if known.stage is Stage.LEAVING else None
    assert (lane.stage.retires, lane.stage.state_row) == (True, row)


def _check_stage(known: Known, lane: Dispatch, shape: GraphShape) -> None:
    step, work = known.due[0], lane.stage
    assert step.kind is shape.kind is not GraphKind.TERMINAL_SNAPSHOT and work is not None
    _check_still(known, lane)
    saved = step.kind in (GraphKind.SNAPSHOT, GraphKind.RESUME) or (step.kind is GraphKind.RESTORE and not step.prefix)
    assert work.state_row == (known.state_row if saved else None)
    assert (work.operation, work.restored_tokens, work.retires) == (step.operation, step.prefix, False)


def _check_prompt(known: Known, lane: Dispatch, shape: GraphShape) -> None:
    spec, work = known.spec, lane.work
    assert shape.kind in ((GraphKind.SCORED_PREFILL,) if spec.scored else PROMPT_KINDS)
    assert work.start == known.consumed and work.tokens > 0 and lane.stage is None
    end = work.start + work.tokens
    assert end <= known.boundary and not work.delivers
    assert not any(start < end < beyond for start, beyond in spec.spans), "a span is cut"
    assert work.emits == (end == spec.prompt_tokens and spec.max_tokens > 0)
    assert work.expected_tokens == work.tokens + work.emits


def _check_round(oracle: Oracle, known: Known, lane: Dispatch, shape: GraphShape, row: RequestRow) -> None:
    work = lane.work
    assert known.stage is Stage.DECODE and shape.kind in STEP_KINDS and lane.stage is None
    works = [flight.lanes[known.id].work for flight in oracle.flights if known.id in flight.lanes]
    assert known.produced + sum(work.tokens for work in works) + work.tokens <= known.spec.max_tokens
    assert work.tokens == 1 or known.estimates, "proposals for a row that needs the host"
    assert work.tokens - 1 <= (known.offered if shape.source is Source.COPY else shape.draft_depth)
    most = round_targets(row, shape)
    assert work.emits and work.delivers and 1 <= work.tokens <= most
    assert (shape.ragged and not oracle.keeps_prefixes) or work.tokens == most, "a prefix is cut without need"


def _check_targets(shape: GraphShape, lanes: Sequence[Dispatch], rows: Sequence[RequestRow], *, shared: bool) -> None:
    """What rounds are to verify, and what is expected of it: by forecasts where the program shares its rows out."""
    targets = [lane.work.tokens for lane in lanes]
    if shared:
        assert shape.ragged and shape.source is Source.DRAFT
        assert targets == [round_targets(row, shape) for row in rows], "a ceiling is cut without need"
        targets = allocate([row.forecast for row in rows], targets, shape.packed_targets)
    assert not shape.packed_targets or sum(targets) <= shape.packed_targets
    for lane, row, count in zip(lanes, rows, targets, strict=True):
        assert math.isclose(lane.work.expected_tokens, round_tokens(row, shape, count))
