"""The joint catalog of mixed graphs: which combinations of request rows, prompt capacity and width are prepared.

Owns the bound on their number. Does not own which of them a device has programs for, or which one runs: durations
decide that. Surprising rule: prompt capacities multiply with batches, but each width beyond one gets a single capacity;
so widths add to the catalog, and do not multiply it.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.machines.graph import GraphKind, GraphShape, rectangular


def mixed_shapes(
    batches: Sequence[int],
    prompt_tokens: Sequence[int],
    prompt_rows: int = 1,
    *,
    width: int | None = None,
    envelope: int = 0,
) -> tuple[GraphShape, ...]:
    """The mixed graphs over these batches and prompt capacities, both rising (docs/scheduling.md, "Mixed graphs").

    Every batch of at least two rows has every prompt capacity at width one. With speculation up to `width` targets for
    each decoding row, these keep the draft's context, and each wider width whose targets in all (batch times width) are
    within `envelope` joins with the capacity of the middle. `width` None: ordinary graphs. Of its rows, a graph gives
    at most `prompt_rows` to prompts, and one at least to decoding.
    """
    shapes = []
    for batch in batches:
        if batch < 2:
            continue
        rows = min(prompt_rows, batch - 1)
        if width is None:
            shapes += [GraphShape(GraphKind.MIXED, batch, tokens, rows) for tokens in prompt_tokens]
            continue
        shapes += [rectangular(GraphKind.MIXED, batch, 1, tokens, rows) for tokens in prompt_tokens]
        middle = _middle(prompt_tokens)
        shapes += [
            rectangular(GraphKind.MIXED, batch, wide, middle, rows)
            for wide in range(2, width + 1)
            if batch * wide <= envelope
        ]
    return tuple(shapes)


def _middle(capacities: Sequence[int]) -> int:
    """The capacity of the least worst ratio to the smallest and to the largest; the smaller one of equals."""
    low, high = min(capacities), max(capacities)
    return min(capacities, key=lambda tokens: (max(tokens / low, high / tokens), tokens))
