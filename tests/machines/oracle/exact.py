"""Small views of few numbers that floating point holds exactly, so that ties are many and real.

Owns the draws of the tie tests. Surprising rule: durations, batches and prices are powers of two or sums of few of
them, wherever a division takes place; a tie is then a tie in both arithmetics, and nothing else is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from flare.machines.graph import GraphKind, GraphShape
from flare.machines.selection.view import GraphRow, Phase, PolicyRow, RequestRow, View
from tests.machines.build import (
    decode_shape,
    decoder,
    graph,
    mixed_shape,
    packed_shape,
    prefill_shape,
    prompt,
    scored_shape,
    speculative_shape,
    stage_shape,
    terminal,
    view,
)

from .cases import FOLLOWING, PREREQUISITES
from .values import SERVED_BY

SURVIVAL = (0.5, 0.25, 0.125)
Rng = random.Random


def _policy(rng: Rng) -> PolicyRow:
    return PolicyRow(
        output_token_value=64.0,
        token_fairness=rng.choice([0.0, 16.0]),
        delivery_fairness=rng.choice([0.0, 4.0]),
        decode_age_price=rng.choice([0.0, 0.5]),
        newcomer_share=8.0,
        terminal_value=rng.choice([64.0, 256.0]),
        terminal_age_price=rng.choice([0.0, 0.5]),
        first_output_age_price=rng.choice([0.0, 0.25]),
        prompt_time_price=rng.choice([0.0, 16.0]),
        first_output_value=rng.choice([0.0, 64.0]),
        first_output_growth_ms=rng.choice([0.0, 32.0]),
        first_output_urgency=rng.choice([0.0, 8.0]),
        first_output_patience_ms=64.0,
    )


def _decoder(rng: Rng, slot: int, *stages: GraphKind) -> RequestRow:
    return decoder(
        slot,
        stages=stages,
        survival=SURVIVAL,
        token_price=rng.choice([8.0, 16.0]),
        delivery_price=16.0,
        age_ms=rng.choice([0.0, 8.0]),
        last_fence=rng.randint(0, 3),
    )


def _prompt(rng: Rng, slot: int, *stages: GraphKind, phase: Phase = Phase.PREFILL) -> RequestRow:
    """No two prompts were served by the same frame: which of them is taken never depends on padding."""
    tokens = rng.choice([16, 32, 64, 256])
    return prompt(
        slot, tokens, stages=stages, phase=phase, token_price=8.0, age_ms=rng.choice([0.0, 64.0]), last_fence=slot
    )


def _terminal(rng: Rng, slot: int) -> RequestRow:
    return terminal(slot, age_ms=rng.choice([0.0, 8.0]), last_fence=rng.randint(0, 3))


def _view(rng: Rng, shapes: Sequence[GraphShape], rows: Sequence[Callable[[int], RequestRow]], ms: list[float]) -> View:
    graphs: list[GraphRow] = []
    for shape in dict.fromkeys(shapes):
        graphs.append(graph(shape, rng.choice(ms), stale=rng.random() < 0.3))
    rng.shuffle(graphs)
    slots = sorted(rng.sample(range(64), len(rows)))
    order = rng.sample(rows, len(rows))
    requests = [row(slot) for row, slot in zip(order, slots, strict=True)]
    return view(graphs, requests, policy=_policy(rng), refresh_funded=rng.random() < 0.3)


def _many(rng: Rng, counts: Sequence[int], row: Callable[[int], RequestRow]) -> list[Callable[[int], RequestRow]]:
    return [row] * rng.choice(counts)


def tokens_view(seed: str) -> View:
    """Ready requests and graphs of tokens."""
    rng = random.Random(seed)
    shapes = [decode_shape(b) for b in rng.sample([1, 2, 4], 2)]
    shapes += [speculative_shape(b, w) for b in rng.sample([1, 2, 4], rng.randint(0, 2)) for w in rng.sample([1, 3], 1)]
    shapes += [prefill_shape(t) for t in rng.sample([16, 32, 64], rng.randint(0, 3))]
    shapes += [packed_shape(t, 2) for t in rng.sample([16, 32, 64], rng.randint(0, 1))]
    shapes += [scored_shape(64)]
    shapes += [mixed_shape(b, t) for b in rng.sample([2, 4], rng.randint(0, 2)) for t in rng.sample([16, 32, 64], 2)]
    rows = _many(rng, [1, 2, 4], lambda slot: _decoder(rng, slot))
    rows += _many(rng, [0, 1, 2], lambda slot: _prompt(rng, slot))
    rows += _many(rng, [0, 1], lambda slot: _prompt(rng, slot, phase=Phase.SCORED_PREFILL))
    unknown = rng.random() < 0.3
    return _view(rng, shapes, rows, [4.0, 8.0, 8.0, 0.0] if unknown else [4.0, 8.0, 8.0])


def stages_view(seed: str) -> View:
    """Terminal rows and rows of exactly three stages, for which T + F is four times T."""
    rng = random.Random(seed)
    kinds = (GraphKind.VISION, GraphKind.SNAPSHOT)
    shapes = [stage_shape(kind, b) for kind in kinds for b in rng.sample([1, 2, 4], 2)]
    shapes += [stage_shape(GraphKind.TERMINAL_SNAPSHOT, b) for b in rng.sample([1, 2, 4], rng.randint(0, 2))]
    shapes += [decode_shape(b) for b in rng.sample([1, 2, 4], 2)]
    rows = _many(rng, [0, 1, 2], lambda slot: _terminal(rng, slot))
    rows += _many(rng, [1, 2, 4], lambda slot: _decoder(rng, slot, *rng.choices(kinds, k=3)))
    rows += _many(rng, [0, 1, 2], lambda slot: _decoder(rng, slot))
    return _view(rng, shapes, rows, [8.0])


def pairs_view(seed: str) -> View:
    """Rows of one stage; all graphs take equally long, so that H is twice T."""
    rng = random.Random(seed)
    stage = rng.choice(PREREQUISITES)
    shapes = [stage_shape(stage, b) for b in rng.sample([1, 2, 4], 2)]
    decoding = rng.choice(SERVED_BY[Phase.DECODE])
    kinds = dict.fromkeys([decoding, rng.choice(FOLLOWING)])
    of_kind: dict[GraphKind, list[GraphShape]] = {
        GraphKind.DECODE: [decode_shape(b) for b in rng.sample([1, 2, 4], 2)],
        GraphKind.SPECULATIVE: [speculative_shape(b, 2) for b in rng.sample([1, 2, 4], 2)],
        GraphKind.PREFILL: [prefill_shape(t) for t in rng.sample([16, 32, 64], 2)],
        GraphKind.SCORED_PREFILL: [scored_shape(t) for t in rng.sample([16, 32, 64], 2)],
        GraphKind.MIXED: [mixed_shape(b, t) for b in rng.sample([2, 4], 1) for t in rng.sample([16, 32, 64], 2)],
    }
    shapes += [shape for kind in kinds for shape in of_kind[kind]]
    rows = _many(rng, [1, 2], lambda slot: _decoder(rng, slot, stage))
    rows += _many(rng, [0, 1, 2], lambda slot: _decoder(rng, slot))
    rows += _many(rng, [0, 1, 2], lambda slot: _prompt(rng, slot, stage))
    rows += _many(rng, [0, 1], lambda slot: _prompt(rng, slot, stage, phase=Phase.SCORED_PREFILL))
    rows += _many(rng, [0, 1], lambda slot: _prompt(rng, slot))
    rows += _many(rng, [0, 1, 2], lambda slot: _terminal(rng, slot))
    return _view(rng, shapes, rows, [8.0, 8.0, 8.0, 0.0] if rng.random() < 0.2 else [8.0])
