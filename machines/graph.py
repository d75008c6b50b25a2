"""The physical identity of a prepared graph.

Owns the kinds of graph and the extents that tell two of them apart; a duration estimate belongs to exactly one
`GraphShape`. Does not own programs, buffers or estimates. Surprising rule: how many rows a frame really uses is not
part of the identity: extents are fixed and lengths are data, even where a program skips the rows that are empty.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class GraphKind(StrEnum):
    """What a prepared graph does (docs/scheduling.md, "Graphs")."""

    PREFILL = "prefill"
    SCORED_PREFILL = "scored_prefill"
    DECODE = "decode"


QUEUEABLE_KINDS = frozenset({GraphKind.DECODE})
"""Kinds of which two frames may be in flight together; every other kind needs an empty window."""


class GraphShape(msgspec.Struct, frozen=True, order=True):
    """One prepared graph: its kind, request rows (B) and prompt tokens.

    `batch` is the number of request rows, at least 1. `prefill_tokens` is the number of prompt positions that the
    graph can consume; 0 for decode.
    """

    kind: GraphKind
    batch: int
    prefill_tokens: int = 0

    @property
    def name(self) -> str:
        """A stable short name for logs and metrics, such as `decode/b4` or `prefill/t512`."""
        if self.kind is GraphKind.DECODE:
            return f"{self.kind}/b{self.batch}"
        return f"{self.kind}/t{self.prefill_tokens}"
