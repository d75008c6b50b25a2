"""A table of what each prepared graph takes, for `flare simulate` (docs/simulation.md, "Costs").

Owns the frames that fill each graph, and the table. Does not own its use. Surprising rule: a table may not fall where
work grows, and measurements do, by a little; so each point is the greatest of itself and all that are less work.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flare.graphs.frames import LaneInput
from flare.graphs.sim.costs import Curve
from flare.machines.graph import GraphKind, GraphShape, Source

from .player import Player, Text, prompt_of
from .replay import decoding, prompts_of, rounds_of

CONTEXT = 1024
"""Tokens behind a decoding row, as in other tables."""

Row = dict[float, float]
Grid = dict[float, Row]
Lane = tuple[Text, LaneInput]


def measure_costs(player: Player, vocab: int, *, context: int, repeats: int) -> dict[str, object]:
    """The table, without what names it. A graph that only a draft makes use of has no place in it."""
    table = _Table(player, vocab, repeats)
    rows = max(shape.batch for shape in player.catalog)
    output = [shape for shape in player.catalog if not shape.prefill_tokens]
    for near in (context // 4, 2 * context):
        texts = decoding(player, rows, near, vocab, limit=repeats * len(output) + 1)
        table.at_context(near, texts)
    texts = decoding(player, rows, context, vocab, limit=repeats * sum(shape.width for shape in output) + repeats * 64)
    for shape in output:
        table.round(shape, texts)
    for shape in player.catalog:
        table.prompt(shape, texts, context)
    return table.finished(context)


class _Table:
    """The measurements so far: rows of a grid by name, and each graph's own time."""

    def __init__(self, player: Player, vocab: int, repeats: int) -> None:
        self._player = player
        self._vocab = vocab
        self._repeats = repeats
        self.context: Grid = defaultdict(dict)
        self.curves: dict[str, Row] = defaultdict(dict)
        self.grids: dict[str, Grid] = defaultdict(lambda: defaultdict(dict))
        self.graphs: dict[str, float] = {}

    def ms(self, shape: GraphShape, lanes: Callable[[], Sequence[Lane]]) -> float:
        """The median of a few frames."""
        taken = [self._player.play(shape, lanes()).device_ns for _ in range(self._repeats)]
        return statistics.median(taken) / 1e6

    def at_context(self, context: int, texts: Sequence[Text]) -> None:
        """Decode rows, so far into their texts."""
        for shape in rounds_of(self._player):
            self.context[context][shape.batch] = self.ms(shape, partial(_turns, texts[: shape.batch]))

    def round(self, shape: GraphShape, texts: Sequence[Text]) -> None:
        """A graph of output alone. Proposals are zeros: verifying wrong ones takes no less."""
        lanes, copies = texts[: shape.batch], shape.source is Source.COPY
        if shape.width > 1 and not copies:
            return
        took = self.ms(shape, lambda: _turns(lanes, shape.width if copies else 1))
        self.graphs[shape.name] = took
        if shape.width == 1:
            self.curves["decode"][shape.batch] = took
        else:
            self.grids["verify"][shape.width][shape.batch] = took

    def prompt(self, shape: GraphShape, texts: Sequence[Text], context: int) -> None:
        """A graph with a prompt, which takes the last slot of all."""
        tokens, slot = shape.prefill_tokens, len(texts) - 1
        match shape.kind:
            case GraphKind.PREFILL:
                took = self.curves["prefill"][tokens] = self.ms(shape, lambda: [self._chunk(slot, tokens)])
                past = self.ms(shape, lambda: [self._chunk(slot, tokens, context)])
                self.grids["prefill_with_past"][context][tokens] = past
            case GraphKind.SCORED_PREFILL:
                took = self.curves["scored_prefill"][tokens] = self.ms(shape, lambda: [self._chunk(slot, tokens)])
            case GraphKind.MIXED if shape.width == 1:
                beside = texts[: shape.batch - 1]
                took = self.ms(shape, lambda: [self._chunk(slot, tokens), *_turns(beside)])
                self.grids["mixed"][shape.batch - 1][tokens] = took
            case _:
                return
        self.graphs[shape.name] = took

    def _chunk(self, slot: int, tokens: int, past: int = 0) -> Lane:
        """So many tokens of a fresh prompt, the `past` ones before them consumed."""
        text = self._player.admit(slot, prompt_of(past + tokens, slot, self._vocab), limit=1)
        graph = prompts_of(self._player, past)
        while text.sent < past:
            self._player.play(graph, [(text, text.chunk(min(past - text.sent, graph.prefill_tokens)))])
        return text, text.chunk(tokens)

    def finished(self, context: int) -> dict[str, object]:
        """The table in its written form."""
        contexts = _rising({context: self.curves["decode"], **self.context})
        decode, prefill = contexts.pop(context), _rising({0: self.curves["prefill"]})[0]
        verify = _rising({1: decode, **self.grids["verify"]})
        past = _rising({0: prefill, **self.grids["prefill_with_past"]})
        table: dict[str, object] = {
            "unit": "ms",
            "context_tokens": context,
            "decode": _written(decode),
            "prefill": _written(prefill),
            "mixed": _written_grid(_rising(self.grids["mixed"])),
            "decode_by_context": _written_grid(contexts),
            "prefill_with_past": _written_grid({at: row for at, row in past.items() if at}),
        }
        if self.curves["scored_prefill"]:
            table["scored_prefill"] = _written(_rising({0: self.curves["scored_prefill"]})[0])
        if self.grids["verify"]:
            table["verify"] = _written_grid({width: row for width, row in verify.items() if width > 1})
        return {**table, "graphs": {name: round(ms, 4) for name, ms in self.graphs.items()}}


def _turns(texts: Sequence[Text], width: int = 1) -> list[Lane]:
    return [(text, text.turn(width=width, proposals=[0] * (width - 1) if width > 1 else None)) for text in texts]


def _rising(grid: Mapping[float, Row]) -> Grid:
    """All rows at all extents, none below what is before it in its row or in the row before."""
    extents = sorted({at for row in grid.values() for at in row})
    risen: Grid = {}
    below: Row = {}
    for place, row in sorted(grid.items()):
        curve, most, filled = Curve(row), 0.0, dict[float, float]()
        for at in extents:
            most = filled[at] = max(most, curve.at(at), below.get(at, 0.0))
        risen[place] = below = filled
    return risen


def _written(row: Row) -> dict[str, float]:
    return {f"{at:g}": round(ms, 4) for at, ms in row.items()}


def _written_grid(grid: Grid) -> dict[str, dict[str, float]]:
    return {f"{place:g}": _written(row) for place, row in grid.items()}
