"""How good the bounded packing order is: against every way to pack prompts into a graph. `-s` prints the figures."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.machines.oracle.cases import case
from tests.machines.oracle.choices import Oracle
from tests.machines.oracle.drafts import Draft, decode_rows, packed, prompt_rows
from tests.machines.oracle.values import SERVED_BY, Number

CASES = 500


def _gain(draft: Draft) -> Number:
    return draft.gain


def _best_packing(oracle: Oracle, draft: Draft) -> float:
    """The greatest gain of a graph over all orders of all sets of its prompt rows, with the decoders that fit."""
    graph, values = draft.graph, oracle.values
    whole = values.ms(graph)
    rows = [row for row in values.prompts if graph.shape.kind in SERVED_BY[row.phase]]
    lanes = [values.decode_lane(row, graph.shape) for row in values.decoders]
    worth = sorted((lane.value(whole) for lane in lanes), reverse=True)
    best = 0.0
    for count in range(min(prompt_rows(graph), len(rows)) + 1):
        beside = sum(worth[: decode_rows(graph, count)])
        for order in permutations(rows, count):
            tokens = packed(order, graph.shape.prefill_tokens)
            if tokens is not None:
                taken = [values.prompt_lane(row, n) for row, n in zip(order, tokens, strict=True)]
                best = max(best, beside + sum(lane.value(whole) for lane in taken))
    return best / float(whole)


@pytest.mark.parametrize("sort", ["packed", "mixed_packed"])
def test_the_packing_order_misses_little_of_the_best_packing(sort: str) -> None:
    losses = []
    for number in range(CASES):
        oracle = Oracle(case(sort, number), float)
        best: dict[object, Draft] = {}
        for draft in oracle.ranked:
            if draft.known and prompt_rows(draft.graph) > 1:
                mine = best.setdefault(draft.graph.shape, draft)
                best[draft.graph.shape] = max(mine, draft, key=_gain)
        for draft in best.values():
            reached = _best_packing(oracle, draft)
            assert draft.gain <= reached * (1 + 1e-12), number
            losses.append(1.0 - draft.gain / reached if reached else 0.0)
    missed = [loss for loss in losses if loss > 1e-12]
    share, mean, most = len(missed) / len(losses), sum(losses) / len(losses), max(losses)
    print(
        f"\n{sort}: of {len(losses)} graphs {share:.1%} miss the best packing; mean loss of value {mean:.2%}, "
        f"of those that miss {sum(missed) / max(1, len(missed)):.1%}, greatest {most:.1%}"
    )
    assert share < 0.25
    assert mean < 0.03
