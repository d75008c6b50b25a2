"""Synthetic durations that scenarios share, in milliseconds.

Owns the startup catalog, read from its file. Does not own what a scenario makes of it. Surprising rule: it is made up;
only its proportions are those of real graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flare.machines.graph import GraphKind
from tests.machines.build import decode_shape, prefill_shape, speculative_shape, stage_shape

from .bench import Costs

STARTUP: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/startup_catalog.json").read_text())


def _batches(rows: dict[str, float]) -> list[tuple[int, float]]:
    return [(int(extent), ms) for extent, ms in rows.items()]


DECODE: Costs = {decode_shape(batch): ms for batch, ms in _batches(STARTUP["decode"])}
PREFILL: Costs = {prefill_shape(tokens): ms for tokens, ms in _batches(STARTUP["prefill"])}
ROUNDS: Costs = {
    speculative_shape(batch, int(width)): ms
    for width, rows in STARTUP["verify"].items()
    for batch, ms in _batches(rows)
}
RETIRE: Costs = {
    stage_shape(GraphKind.TERMINAL_SNAPSHOT, batch): ms for batch, ms in _batches(STARTUP["terminal_snapshot"])
}
PLAIN: Costs = {**DECODE, **PREFILL}
ALL: Costs = {**DECODE, **ROUNDS, **PREFILL, **RETIRE}
