"""The catalog of speculative programs: which combinations of request rows, width and target rows are prepared.

Owns the bound on their number. Does not own which of them a device has programs for, or which one runs: durations
decide that. Surprising rule: a program of width one is listed with those that propose themselves; asked for copies
alone, there is none, because it would be the same program.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.machines.graph import GraphKind, GraphShape, Source, rectangular


def speculative_shapes(
    batches: Sequence[int],
    widths: Sequence[int],
    *,
    source: Source = Source.DRAFT,
    envelope: int,
    ragged: bool = False,
) -> tuple[GraphShape, ...]:
    """The speculative programs over these batches and widths, both rising (docs/scheduling.md, "Speculative rounds").

    Width one, which keeps the draft's context, is there for every batch if `source` is DRAFT, whether or not it is
    among `widths`. Each wider width W is there for the batches with `batch * W <= envelope`, proposing W - 1 for each
    row.

    `ragged` adds, for each batch of two rows or more, programs of the widest width whose rows share fewer target rows
    P than B * W: the powers of two from 2 * B on, within the envelope. A program of P = B verifies nothing, and the
    widest offers every choice that a narrower one does, for proposals that cost no more target rows; so the number of
    programs grows with the logarithm of the width. They may be wider than a rectangular program of their batch could be
    within the envelope: that is what they are for.
    """
    wide = [width for width in widths if width > 1]
    kept = [rectangular(GraphKind.SPECULATIVE, batch, 1) for batch in batches] if source is Source.DRAFT else []
    kept += [
        rectangular(GraphKind.SPECULATIVE, batch, width, source=source)
        for batch in batches
        for width in wide
        if batch * width <= envelope
    ]
    if ragged and wide:
        kept += [
            _ragged(batch, max(wide), targets, source)
            for batch in batches
            for targets in _powers(2 * batch, min(batch * max(wide) - 1, envelope))
            if batch > 1
        ]
    return tuple(kept)


def _ragged(batch: int, width: int, targets: int, source: Source) -> GraphShape:
    return GraphShape(
        GraphKind.SPECULATIVE,
        batch,
        width=width,
        draft_depth=width - 1,
        packed_targets=targets,
        drafts=True,
        source=source,
    )


def _powers(least: int, most: int) -> list[int]:
    """The powers of two from `least` to `most`."""
    return [1 << exponent for exponent in range((least - 1).bit_length(), most.bit_length()) if 1 << exponent <= most]
