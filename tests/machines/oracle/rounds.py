"""Small random views of speculative rounds: two sources of proposals, shared target rows, funded probes.

Owns the draws of the enumeration tests of rounds. Does not own what is expected of them. Surprising rule: catalogs come
in families of one width and depth, so that programs of few and of many target rows often do the same work.
"""

from __future__ import annotations

import random

import msgspec

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.selection.view import RequestRow, View
from tests.machines.build import (
    BALANCED,
    decode_shape,
    mixed_shape,
    prefill_shape,
    prompt,
    speculative_shape,
    stage_shape,
    view,
)

from .cases import a_decoder, policy, priced, rows_of

Rng = random.Random


def packed_round(batch: int, width: int, targets: int, source: Source = Source.DRAFT) -> GraphShape:
    """A speculative program of D = W - 1 with so many target rows, ragged or not."""
    packed = max(batch, min(targets, batch * width))
    return GraphShape(
        GraphKind.SPECULATIVE,
        batch,
        width=width,
        draft_depth=width - 1,
        packed_targets=packed,
        drafts=True,
        source=source,
    )


def falling(rng: Rng, count: int) -> tuple[float, ...]:
    """Probabilities that never rise."""
    return tuple(sorted((rng.random() for _ in range(count)), reverse=True))


def a_row(rng: Rng, slot: int, great: float, *stages: GraphKind) -> RequestRow:
    """A decoding row of two sources, with forecasts, and estimates as of a funded probe."""
    row = a_decoder(rng, slot, great, *stages)
    depth, copies = len(row.survival), rng.choice([0, 1, 2, 4])
    copied = falling(rng, copies)
    return msgspec.structs.replace(
        row,
        forecast=falling(rng, depth) if rng.random() < 0.9 else (),
        copy_survival=copied,
        copy_scored_survival=tuple(s * s for s in copied),
        optimistic=tuple(s ** rng.uniform(0.05, 0.5) for s in row.scored_survival[:1]) * depth,
        copy_optimistic=tuple(s ** rng.uniform(0.05, 0.5) for s in copied[:1]) * copies,
        weights=tuple(rng.uniform(0.0, 128.0) for _ in range(depth)),
        copy_weights=tuple(rng.uniform(0.0, 128.0) for _ in range(copies)),
    )


def _source(rng: Rng) -> Source:
    return rng.choice([Source.DRAFT, Source.DRAFT, Source.COPY])


def _shapes(rng: Rng, *, ragged: bool) -> list[GraphShape]:
    shapes = [decode_shape(b) for b in rng.sample([1, 2, 4, 8], rng.randint(0, 2))]
    for _ in range(rng.randint(1, 2)):
        source, width = _source(rng), rng.choice([2, 3, 4])
        for _ in range(rng.randint(1, 4)):
            batch = rng.choice([1, 2, 3, 4, 6])
            targets = rng.randint(batch, batch * width) if ragged and rng.random() < 0.7 else batch * width
            shapes.append(packed_round(batch, width, targets, source))
    if rng.random() < 0.2:
        shapes.append(mixed_shape(4, 64, width=rng.choice([1, 2, 3])))
    if rng.random() < 0.2:
        shapes.append(speculative_shape(rng.choice([1, 2, 4]), 1))
    return shapes


def rounds_case(sort: str, number: int) -> View:
    """A view of `sources`, `ragged` or `probes`, the same on every run."""
    rng = random.Random(f"{sort}/{number}")
    shapes = _shapes(rng, ragged=sort == "ragged" or rng.random() < 0.3)
    great = rng.choice([2.0, 60.0, 1e4])
    rows: list[RequestRow] = []
    slots = sorted(rng.sample(range(64), rng.randint(2, 6)))
    stage = rng.choice([GraphKind.RESUME, GraphKind.RESTORE]) if rng.random() < 0.2 else None
    if stage is not None:
        shapes.append(stage_shape(stage, rng.choice([1, 2])))
    if rng.random() < 0.1:
        shapes.append(prefill_shape(64))
        rows.append(prompt(63, rng.randint(1, 90)))
        slots = [slot for slot in slots if slot != 63]
    for slot in slots:
        rows.append(a_row(rng, slot, great, *([stage] if stage and rng.random() < 0.3 else [])))
    rows.sort(key=lambda row: row.slot)
    graphs = rows_of(rng, shapes)
    if sort == "probes":
        graphs = [msgspec.structs.replace(row, duration_ns=rng.randrange(15_000_000, 25_000_000)) for row in graphs]
    taken = view(
        graphs,
        rows,
        policy=BALANCED if rng.random() < 0.3 else priced(rng, policy(rng)),
        value_scale=rng.choice([1.0, 2.0**-13, rng.uniform(1e-6, 1.0)]),
        queued_requests=rng.choice([0, 3]),
        refresh_funded=sort == "probes" and rng.random() < 0.1,
    )
    return msgspec.structs.replace(
        taken,
        probe_funded=sort == "probes" or rng.random() < 0.1,
        device_allocates=rng.random() < 0.5,
        keeps_prefixes=sort != "probes" and rng.random() < 0.4,
        host_gap_ms=rng.choice([0.0, 0.0, rng.uniform(0.1, 20.0)]),
    )
