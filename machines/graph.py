"""The physical identity of a prepared graph.

Owns the kinds of graph, the extents that tell two of them apart, and the contract of each kind; a duration estimate
belongs to exactly one `GraphShape`. Does not own programs, buffers or estimates. Surprising rule: how many rows a
frame really uses is not part of the identity: extents are fixed and lengths are data, even where a program skips the
rows that are empty.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

ROWS_MAX = 64
"""Request rows that any graph may have."""


class GraphKind(StrEnum):
    """What a prepared graph does (docs/scheduling.md, "Graphs")."""

    PREFILL = "prefill"
    SCORED_PREFILL = "scored_prefill"
    DECODE = "decode"
    SPECULATIVE = "speculative"
    MIXED = "mixed"
    INITIALIZE = "initialize"
    RESTORE = "restore"
    VISION = "vision"
    SNAPSHOT = "snapshot"
    TERMINAL_SNAPSHOT = "terminal_snapshot"
    RESUME = "resume"


class Source(StrEnum):
    """Who makes the proposals of a speculative program (docs/scheduling.md, "Speculative rounds")."""

    DRAFT = "draft"
    """The program itself, with a learned head or a draft model."""
    COPY = "copy"
    """The host, which copies a span of the request's own tokens."""


QUEUEABLE_KINDS = frozenset({GraphKind.DECODE, GraphKind.SPECULATIVE})
"""Kinds of which two frames may be in flight together; every other kind needs an empty window."""

STAGE_KINDS = frozenset(
    {
        GraphKind.INITIALIZE,
        GraphKind.RESTORE,
        GraphKind.VISION,
        GraphKind.SNAPSHOT,
        GraphKind.TERMINAL_SNAPSHOT,
        GraphKind.RESUME,
    }
)
"""Kinds that move state and give no tokens."""

SNAPSHOT_KINDS = frozenset({GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT})
"""The snapshot family: kinds that can retire a finished request."""

PROMPT_KINDS = frozenset({GraphKind.PREFILL, GraphKind.SCORED_PREFILL, GraphKind.MIXED})
"""Kinds that consume prompt tokens."""


class GraphShape(msgspec.Struct, frozen=True, order=True):
    """One prepared graph: its kind and its extents. Raises ValueError for extents that the kind does not have.

    `batch` (B) is the number of request rows, 1 to `ROWS_MAX`. `prefill_tokens` is the number of prompt positions that
    the graph can consume, 0 for kinds that consume none. `prompt_rows` is how many of a mixed graph's rows may consume
    a prompt, at least 1; all of a prefill graph's may, and it leaves this at 0. `width` (W) is the number of target
    positions for each decoding row, the pending token among them; `draft_depth` (D) the proposals that the program
    makes for each, or that the host supplies at most (`source`); `packed_targets` (P) its target rows in all, B * W for
    a rectangular program. `drafts`: the program keeps the draft's context up to date, as all speculative ones do, at
    width one too, where `source` says nothing.
    """

    kind: GraphKind
    batch: int
    prefill_tokens: int = 0
    prompt_rows: int = 0
    width: int = 1
    draft_depth: int = 0
    packed_targets: int = 0
    drafts: bool = False
    source: Source = Source.DRAFT

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"{self.kind} graph: {problem}")

    def _problem(self) -> str | None:
        """What is wrong with the extents, naming the field; None if nothing is."""
        kind = self.kind
        if not 1 <= self.batch <= ROWS_MAX:
            return f"batch {self.batch} is outside 1 to {ROWS_MAX}"
        prompts = kind in PROMPT_KINDS
        if prompts != (self.prefill_tokens > 0) or self.prefill_tokens < 0:
            return f"prefill_tokens is {self.prefill_tokens}; it must be {'positive' if prompts else '0'}"
        if kind is GraphKind.MIXED:
            if self.batch < 2:
                return "batch is 1; a mixed graph has at least 2 rows"
            if not 1 <= self.prompt_rows < self.batch:
                return f"prompt_rows {self.prompt_rows} is outside 1 to {self.batch - 1}"
            if self.prefill_tokens < self.width:
                return f"prefill_tokens {self.prefill_tokens} is below the width {self.width}"
        elif self.prompt_rows:
            return f"prompt_rows is {self.prompt_rows}; only a mixed graph declares it"
        return self._speculation_problem()

    def _speculation_problem(self) -> str | None:
        speculative = self.kind is GraphKind.SPECULATIVE
        if self.width < 1 or self.draft_depth < 0:
            return f"width {self.width} and draft_depth {self.draft_depth} must be at least 1 and 0"
        if speculative or (self.kind is GraphKind.MIXED and self.drafts):
            if not self.drafts:
                return "drafts is false; a speculative program keeps the draft's context"
            if self.packed_targets < self.batch or self.packed_targets > self.batch * self.width:
                return f"packed_targets {self.packed_targets} is outside {self.batch} to {self.batch * self.width}"
            if (self.width == 1) != (self.draft_depth == 0):
                return f"width {self.width} with draft_depth {self.draft_depth}: only width one proposes nothing"
            if self.source is Source.COPY and (self.width == 1 or not speculative):
                return "source is copy; only a speculative program wider than one is supplied with proposals"
            return None
        if self.width != 1 or self.draft_depth or self.packed_targets or self.drafts or self.source is Source.COPY:
            return "width, draft_depth, packed_targets, drafts and source are for speculative programs"
        return None

    @property
    def ragged(self) -> bool:
        """Whether its rows share fewer target rows than their widths come to."""
        return 0 < self.packed_targets < self.batch * self.width

    @property
    def name(self) -> str:
        """A stable short name for logs and metrics, such as `decode/b4`, `prefill/t512`, `speculative/b4d3w4` (its own
        proposals) or `speculative/b4c3w4` (copied ones)."""
        if self.kind in STAGE_KINDS or self.kind is GraphKind.DECODE:
            return f"{self.kind}/b{self.batch}"
        if self.kind is GraphKind.SPECULATIVE:
            packed = f"p{self.packed_targets}" if self.ragged else ""
            depth = f"{'c' if self.source is Source.COPY else 'd'}{self.draft_depth}"
            return f"{self.kind}/b{self.batch}{depth}w{self.width}{packed}"
        if self.kind is GraphKind.MIXED:
            rows = f"r{self.prompt_rows}" if self.prompt_rows > 1 else ""
            wide = f"d{self.draft_depth}w{self.width}" if self.drafts else ""
            return f"{self.kind}/b{self.batch}t{self.prefill_tokens}{rows}{wide}"
        rows = f"r{self.batch}" if self.batch > 1 else ""
        return f"{self.kind}/t{self.prefill_tokens}{rows}"


def rectangular(
    kind: GraphKind,
    batch: int,
    width: int,
    prefill_tokens: int = 0,
    prompt_rows: int = 0,
    source: Source = Source.DRAFT,
) -> GraphShape:
    """A rectangular program that keeps the draft's context: B rows of W targets each, D = W - 1 proposals."""
    packed = batch * width
    return GraphShape(kind, batch, prefill_tokens, prompt_rows, width, width - 1, packed, drafts=True, source=source)
