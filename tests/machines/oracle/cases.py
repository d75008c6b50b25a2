"""Small random views, of one sort each: catalogs and requests in which one kind of candidate matters.

Owns the draws of the enumeration tests. Does not own what is expected of them. Surprising rule: most rows are drawn
with everything that can differ (prices not yet set, spans, survival, ages, fences), since rules fail where they meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from flare.machines.graph import SNAPSHOT_KINDS, GraphKind, GraphShape
from flare.machines.selection.view import GraphRow, Phase, PolicyRow, RequestRow, View
from tests.machines.build import (
    NOW_NS,
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

PREREQUISITES = (GraphKind.INITIALIZE, GraphKind.RESTORE, GraphKind.VISION, GraphKind.SNAPSHOT, GraphKind.RESUME)
FOLLOWING = (
    GraphKind.DECODE,
    GraphKind.SPECULATIVE,
    GraphKind.PREFILL,
    GraphKind.SCORED_PREFILL,
    GraphKind.MIXED,
)

Rng = random.Random


def policy(rng: Rng, *, first_output: bool = True) -> PolicyRow:
    """Coefficients around the presets, each of them 0 now and then."""
    return PolicyRow(
        output_token_value=rng.choice([64.0, 1.0, 0.0, rng.uniform(0.1, 200.0)]),
        token_fairness=rng.choice([16.0, 1.0, 0.0, rng.uniform(0.1, 30.0)]),
        delivery_fairness=rng.choice([4.0, 0.0, rng.uniform(0.1, 30.0)]),
        decode_age_price=rng.choice([0.1, 0.3, 0.0, rng.uniform(0.01, 3.0)]),
        newcomer_share=rng.choice([8.0, 1.0, 2.5]),
        terminal_value=rng.choice([256.0, 0.0, rng.uniform(1.0, 4000.0)]),
        terminal_age_price=rng.choice([1.0, 0.0, rng.uniform(0.01, 3.0)]),
        first_output_age_price=rng.choice([0.0, 0.1, rng.uniform(0.0, 2.0)]) if first_output else 0.0,
    )


def priced(rng: Rng, row: PolicyRow) -> PolicyRow:
    """`row` with some of what only some policies price: time, first outputs and gaps; without any in half of the
    views."""
    if rng.random() < 0.5:
        return row
    return msgspec.structs.replace(
        row,
        output_time_price=rng.choice([0.0, 100.0, rng.uniform(0.0, 300.0)]),
        prompt_time_price=rng.choice([0.0, 400.0, rng.uniform(0.0, 900.0)]),
        first_output_value=rng.choice([0.0, 1500.0, rng.uniform(0.0, 9000.0)]),
        first_output_growth_ms=rng.choice([0.0, 30_000.0, rng.uniform(1.0, 900.0)]),
        first_output_urgency=rng.choice([0.0, 50.0, rng.uniform(0.0, 900.0)]),
        first_output_patience_ms=rng.choice([500.0, rng.uniform(1.0, 900.0)]),
        gap_price=rng.choice([0.0, 200.0, rng.uniform(0.0, 900.0)]),
        gap_stretch=rng.choice([5.0, 5.0, rng.uniform(1.0, 50.0)]),
    )


def rows_of(rng: Rng, shapes: Sequence[GraphShape]) -> list[GraphRow]:
    """Graph rows with drawn durations: unknown ones in some views, stale ones among the rest."""
    unknown = rng.choice([0.0, 0.0, 0.0, 0.1, 0.5])
    rows = []
    for shape in dict.fromkeys(shapes):
        row = graph(shape, 0.0 if rng.random() < unknown else rng.uniform(0.5, 90.0), stale=rng.random() < 0.2)
        if row.duration_ns:
            observed, attempted = (NOW_NS - rng.randrange(1, 60) * 10**9 for _ in range(2))
            row = msgspec.structs.replace(row, observed_at_ns=observed, attempted_at_ns=attempted)
        rows.append(row)
    rng.shuffle(rows)
    return rows


def price(rng: Rng, great: float) -> float | None:
    """A service price, not set now and then."""
    return None if rng.random() < 0.15 else rng.uniform(0.0, great)


def a_decoder(rng: Rng, slot: int, great: float, *stages: GraphKind) -> RequestRow:
    """A decoding row. Only one without stages can have no output left."""
    survival = [rng.uniform(0.0, 1.0) for _ in range(rng.choice([0, 1, 3, 5]))]
    survival.sort(reverse=True)
    return decoder(
        slot,
        stages=stages,
        survival=tuple(survival),
        scored_survival=tuple(s * s for s in survival),
        token_price=price(rng, great),
        delivery_price=price(rng, great),
        age_ms=rng.choice([0.0, rng.uniform(0.0, 300.0)]),
        last_fence=rng.randint(0, 5),
        output_left=rng.choice([1, 2, 50, 50] if stages else [0, 1, 2, 50, 50]),
        needs_feedback=rng.random() < 0.1,
    )


def a_prompt(rng: Rng, slot: int, great: float, phase: Phase, *stages: GraphKind) -> RequestRow:
    """A row that consumes its prompt, with a span or two ahead in some."""
    tokens = rng.randint(1, rng.choice([40, 400]))
    position = rng.choice([0, rng.randrange(tokens)])
    spans = []
    start = position
    while rng.random() < 0.3 and start < tokens:
        start = rng.randint(start, tokens - 1)
        stop = rng.randint(start + 1, min(tokens, start + 80))
        spans.append((start, stop))
        start = stop
    return prompt(
        slot,
        tokens,
        stages=stages,
        spans=tuple(spans),
        age_ms=rng.choice([0.0, rng.uniform(0.0, 900.0)]),
        position=position,
        boundary=rng.choice([tokens, tokens, rng.randint(position + 1, tokens)]),
        next_endpoint=rng.choice([tokens, rng.randint(position + 1, tokens)]),
        phase=phase,
        output_left=rng.choice([0, 1, 50]),
        token_price=price(rng, great),
        last_fence=rng.randint(0, 5),
        needs_feedback=rng.random() < 0.1,
    )


def a_terminal(rng: Rng, slot: int) -> RequestRow:
    """A finished row."""
    return terminal(slot, age_ms=rng.choice([0.0, rng.uniform(0.0, 300.0)]), last_fence=rng.randint(0, 5))


Row = Callable[[int], RequestRow]


class Draw:
    """One view in the making: what every sort of case draws from."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.great = self.rng.choice([2.0, 60.0, 1e4])
        self.shapes: list[GraphShape] = []
        self.rows: list[Row] = []

    def some(self, most: int, shape: Callable[..., GraphShape], *extents: Sequence[int], least: int = 0) -> None:
        """Between `least` and `most` shapes with drawn extents."""
        for _ in range(self.rng.randint(least, most)):
            self.shapes.append(shape(*(self.rng.choice(extent) for extent in extents)))

    def decoders(self, least: int, most: int, *stages: GraphKind) -> None:
        for _ in range(self.rng.randint(least, most)):
            self.rows.append(lambda slot: a_decoder(self.rng, slot, self.great, *stages))

    def prompts(self, least: int, most: int, *stages: GraphKind, phase: Phase = Phase.PREFILL) -> None:
        for _ in range(self.rng.randint(least, most)):
            self.rows.append(lambda slot: a_prompt(self.rng, slot, self.great, phase, *stages))

    def terminals(self, least: int, most: int) -> None:
        for _ in range(self.rng.randint(least, most)):
            self.rows.append(lambda slot: a_terminal(self.rng, slot))

    def twins(self) -> None:
        """Beside some shapes one that differs in one capacity, so that the filters have something to do."""
        for shape in tuple(self.shapes):
            if self.rng.random() < 0.25:
                if shape.kind is GraphKind.SCORED_PREFILL or (shape.prefill_tokens and self.rng.random() < 0.5):
                    larger = msgspec.structs.replace(shape, prefill_tokens=2 * shape.prefill_tokens)
                else:
                    batch = shape.batch + self.rng.choice([1, 2, 4])
                    packed = batch * shape.width if shape.drafts else 0
                    larger = msgspec.structs.replace(shape, batch=batch, packed_targets=packed)
                self.shapes.append(larger)

    def view(self) -> View:
        """The view as drawn; a refresh is funded in some."""
        slots = sorted(self.rng.sample(range(64), len(self.rows)))
        self.rng.shuffle(self.rows)
        return view(
            rows_of(self.rng, self.shapes),
            [row(slot) for row, slot in zip(self.rows, slots, strict=True)],
            policy=priced(self.rng, policy(self.rng)),
            value_scale=self.rng.choice([1.0, 1.0, 2.0**-13, self.rng.uniform(1e-6, 1.0)]),
            queued_requests=self.rng.choice([0, 0, 3]),
            refresh_funded=self.rng.random() < 0.2,
        )


def _mixed(batch: int, tokens: int, rows: int, width: int) -> GraphShape:
    return mixed_shape(batch, tokens, rows=min(rows, batch - 1), width=width or None)


BATCHES, WIDE, CHUNKS = [1, 2, 3, 4, 6, 8], [1, 2, 3, 4], [16, 32, 64, 128, 256]


def _decode(draw: Draw) -> None:
    draw.some(4, decode_shape, BATCHES, least=1)
    draw.some(1, prefill_shape, CHUNKS)
    draw.decoders(1, 5)
    draw.prompts(0, 1)


def _speculative(draw: Draw) -> None:
    draw.some(5, speculative_shape, BATCHES, WIDE, least=1)
    draw.some(1, decode_shape, BATCHES)
    draw.decoders(1, 5)


def _prefill(draw: Draw) -> None:
    draw.some(4, prefill_shape, CHUNKS, least=1)
    draw.some(1, decode_shape, BATCHES)
    draw.prompts(1, 5)
    draw.decoders(0, 2)


def _packed(draw: Draw) -> None:
    draw.some(4, packed_shape, CHUNKS, [2, 3, 4], least=1)
    draw.some(2, prefill_shape, CHUNKS)
    draw.some(1, decode_shape, BATCHES)
    draw.prompts(2, 6)
    draw.decoders(0, 2)


def _scored(draw: Draw) -> None:
    draw.some(3, scored_shape, CHUNKS, least=1)
    draw.some(1, prefill_shape, CHUNKS)
    draw.prompts(1, 3, phase=Phase.SCORED_PREFILL)
    draw.prompts(0, 1)
    draw.decoders(0, 1)
    draw.some(1, decode_shape, BATCHES)


def _mixed_case(draw: Draw, rows: Sequence[int]) -> None:
    draw.some(5, _mixed, [2, 3, 4, 8], CHUNKS, rows, [0, 0, 1, 2, 3], least=1)
    draw.some(1, decode_shape, BATCHES)
    draw.some(1, prefill_shape, CHUNKS)
    draw.decoders(0, 4)
    draw.prompts(0 if draw.rows else 1, 4)
    draw.prompts(0, 1, phase=Phase.SCORED_PREFILL)


def _mixed_one(draw: Draw) -> None:
    _mixed_case(draw, [1])


def _mixed_packed(draw: Draw) -> None:
    _mixed_case(draw, [1, 2, 3])


def _terminal(draw: Draw) -> None:
    for kind in sorted(SNAPSHOT_KINDS):
        draw.some(2, lambda batch, kind=kind: stage_shape(kind, batch), [1, 2, 4])
    draw.some(1, decode_shape, BATCHES, least=1)
    draw.terminals(1, 4)
    draw.decoders(0, 2)
    draw.decoders(0, 1, GraphKind.SNAPSHOT)


def _chains(draw: Draw) -> None:
    kinds = draw.rng.sample(PREREQUISITES, 2)
    for kind in kinds:
        draw.some(2, lambda batch, kind=kind: stage_shape(kind, batch), [1, 2, 4], least=1)
    draw.some(2, decode_shape, BATCHES, least=1)
    draw.some(1, speculative_shape, BATCHES, WIDE)
    draw.some(2, prefill_shape, CHUNKS, least=1)
    draw.some(1, _mixed, [2, 4], CHUNKS, [1], [0, 2])
    for _ in range(draw.rng.randint(1, 3)):
        stages = tuple(draw.rng.choices(kinds, k=draw.rng.randint(2, 4)))
        if draw.rng.random() < 0.5:
            draw.decoders(1, 1, *stages)
        else:
            draw.prompts(1, 1, *stages)
    draw.decoders(0, 1, draw.rng.choice(kinds))
    draw.decoders(0, 2)
    draw.terminals(0, 1)


def _following(draw: Draw) -> list[GraphKind]:
    """One to three kinds of following graphs."""
    kinds = draw.rng.sample(FOLLOWING, draw.rng.randint(1, 3))
    shapes: dict[GraphKind, Callable[[], None]] = {
        GraphKind.DECODE: lambda: draw.some(2, decode_shape, BATCHES, least=1),
        GraphKind.SPECULATIVE: lambda: draw.some(2, speculative_shape, BATCHES, WIDE, least=1),
        GraphKind.PREFILL: lambda: draw.some(2, packed_shape, CHUNKS, [1, 1, 2], least=1),
        GraphKind.SCORED_PREFILL: lambda: draw.some(2, scored_shape, CHUNKS, least=1),
        GraphKind.MIXED: lambda: draw.some(2, _mixed, [2, 3, 4], CHUNKS, [1, 1, 2], [0, 1, 2], least=1),
    }
    for kind in kinds:
        shapes[kind]()
    return kinds


def _pairs(stage: GraphKind) -> Callable[[Draw], None]:
    def draw_pairs(draw: Draw) -> None:
        rng = draw.rng
        draw.some(2, lambda batch: stage_shape(stage, batch), [1, 2, 3, 4], least=1)
        kinds = _following(draw)
        decodes = {GraphKind.DECODE, GraphKind.SPECULATIVE, GraphKind.MIXED} & set(kinds)
        if decodes:
            draw.decoders(1, 4, stage)
            draw.decoders(0, 4)
        if {GraphKind.PREFILL, GraphKind.MIXED} & set(kinds):
            draw.prompts(0 if decodes else 1, 3, stage)
            draw.prompts(0, 2)
        if GraphKind.SCORED_PREFILL in kinds:
            draw.prompts(1, 2, stage, phase=Phase.SCORED_PREFILL)
        if rng.random() < 0.4:
            # Longer chains that room in the first graph may advance.
            other = rng.choice(PREREQUISITES)
            draw.some(1, lambda batch: stage_shape(other, batch), [1, 2], least=1)
            if decodes:
                draw.decoders(0, 2, stage, other)
            if {GraphKind.PREFILL, GraphKind.MIXED} & set(kinds):
                draw.prompts(0, 2, stage, other)
            if GraphKind.SCORED_PREFILL in kinds:
                draw.prompts(0, 1, stage, other, phase=Phase.SCORED_PREFILL)
        draw.terminals(0, 3 if stage is GraphKind.SNAPSHOT else 1)

    return draw_pairs


SORTS: dict[str, Callable[[Draw], None]] = {
    "decode": _decode,
    "speculative": _speculative,
    "prefill": _prefill,
    "packed": _packed,
    "scored": _scored,
    "mixed": _mixed_one,
    "mixed_packed": _mixed_packed,
    "terminal": _terminal,
    "chains": _chains,
} | {f"pairs_{stage}": _pairs(stage) for stage in PREREQUISITES}


def case(sort: str, number: int) -> View:
    """The view of one case, the same on every run."""
    draw = Draw(f"{sort}/{number}")
    SORTS[sort](draw)
    draw.twins()
    return draw.view()
