"""Which graphs a world has: those of tokens always, every other kind in some of the worlds.

Owns the random choice of shapes. Does not own their costs (`scenario`). Surprising rule: in about a quarter of the
worlds there is a graph of every kind, so that all of them meet.
"""

from __future__ import annotations

import random

from flare.machines.graph import GraphKind, GraphShape, Source, rectangular

OPTIONAL = (
    *(GraphKind.SCORED_PREFILL, GraphKind.SPECULATIVE, GraphKind.MIXED, GraphKind.INITIALIZE, GraphKind.RESTORE),
    *(GraphKind.VISION, GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT, GraphKind.RESUME),
)


def draw_catalog(rng: random.Random, slots: int) -> tuple[GraphShape, ...]:
    """A catalog for so many slots."""
    batches = [batch for batch in (1, 2, 4, 8) if batch < 2 * slots]
    share = rng.choice((0.0, 0.5, 0.5, 1.0))
    kinds = [kind for kind in OPTIONAL if rng.random() < share]
    shapes = [
        GraphShape(GraphKind.DECODE, batch) for batch in sorted(rng.sample(batches, rng.randint(1, len(batches))))
    ]
    shapes.extend(_prompts(rng, GraphKind.PREFILL))
    for kind in kinds:
        match kind:
            case GraphKind.SCORED_PREFILL:
                shapes.extend(_prompts(rng, kind))
            case GraphKind.SPECULATIVE:
                widths = rng.sample((2, 3, 5), rng.randint(1, 2))
                shapes.extend(rectangular(kind, rng.choice(batches), width) for width in sorted({1, *widths}))
                shapes.extend(_rounds(rng, rng.choice(batches), width) for width in (*widths, *widths))
            case GraphKind.MIXED:
                shapes.append(GraphShape(kind, rng.choice((2, 4)), rng.choice((8, 32)), 1))
                shapes.append(GraphShape(kind, 4, 16, 2))
                if GraphKind.SPECULATIVE in kinds:
                    shapes.append(rectangular(kind, 4, 2, rng.choice((8, 32)), rng.choice((1, 3))))
            case _:
                shapes.extend(GraphShape(kind, batch) for batch in sorted(rng.sample((1, 2, 4), rng.randint(1, 2))))
    return tuple(dict.fromkeys(shapes))


def _rounds(rng: random.Random, batch: int, width: int) -> GraphShape:
    """A program of copies, or one whose rows share target rows, or both; it may propose more than it verifies."""
    source = rng.choice(tuple(Source))
    packed = min(batch + rng.choice((0, 1, 3, 100)), batch * width - (source is Source.DRAFT))
    depth = rng.choice((max(1, width - 2), width - 1, width))
    return GraphShape(
        GraphKind.SPECULATIVE,
        batch,
        width=width,
        draft_depth=depth,
        packed_targets=packed,
        drafts=True,
        source=source,
    )


def _prompts(rng: random.Random, kind: GraphKind) -> list[GraphShape]:
    capacities = sorted(rng.sample((4, 8, 16, 32, 64), rng.randint(1, 3)))
    shapes = [GraphShape(kind, 1, tokens) for tokens in capacities]
    if rng.random() < 0.3:
        shapes.append(GraphShape(kind, rng.choice((2, 4)), rng.choice((16, 32))))
    return shapes
