"""The step of a card as a program of the host, so that it passes what the programs of the CPU pass.

Owns twins of the host's rows and buffers, with the row and page of nobody, and the shape that a step is a replay of.
Surprising rule: a fresh binding goes through `Binds`, as it does on a card; other rows are copied, because tests write
to them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields

import torch

from flare.graphs.cuda.binds import BOUND, Binds, FrameScalars
from flare.graphs.cuda.pages import CudaPages
from flare.graphs.cuda.plain_attention import PlainAttention
from flare.graphs.cuda.step import CudaStep
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.buffers import StepBuffers
from flare.graphs.programs.extents import Extents
from flare.graphs.programs.rows import StateRows
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from tests.graphs.cuda.capture_mode import CaptureMode

INPUTS = (
    "slot",
    "start",
    "rows",
    "emits",
    "prefill_row",
    "seen",
    "history_tokens",
    "history_counts",
    "banned_count",
    "banned",
    "banned_rows",
    "tokens",
    "targets",
)
"""Of `StepBuffers`: what a frame is written to."""
ADVANCES = ("pending", "committed", "remaining", "ended")


class CudaProgram:
    """A `StepProgram` on CPU tensors, for rows and buffers of the host. `shape` is that of the graph which a step
    replays (None: any that the step fits)."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        rows: StateRows,
        buffers: StepBuffers,
        pages: int,
        draft: DraftModel | None = None,
    ) -> None:
        self.rows = rows
        self.buffers = buffers
        self.kv = KvPages.allocate(config, 0, torch.float32)
        self._slots = len(rows.ended)
        lanes, width = buffers.token.shape
        positions = rows.page_table.shape[1] * PAGE_TOKENS
        draft_vocab = buffers.draft_probabilities.shape[-1]
        extents = Extents(lanes, len(buffers.prefill_row), len(buffers.tokens), width)
        self._rows = StateRows.allocate(self._slots + 1, positions)
        self._buffers = StepBuffers.allocate(extents, buffers.history_tokens.shape[1], self._slots + 1, draft_vocab)
        self._binds = Binds.allocate(len(buffers.prefill_row), positions)
        self.scalars = FrameScalars.allocate(lanes)
        self.pages = CudaPages.allocate(config, pages, PAGE_TOKENS, torch.float32)
        self.cuda = CudaStep(
            config,
            source,
            rows=self._rows,
            buffers=self._buffers,
            binds=self._binds,
            scalars=self.scalars,
            kv=self.pages,
            device=torch.device("cpu"),
            dtype=torch.float32,
            positions=positions,
            attention=PlainAttention(),
            draft=draft,
            draft_kv=None if draft is None else CudaPages.allocate(draft.config, pages, PAGE_TOKENS, torch.float32),
            rejects=draft_vocab > 0,
        )
        self.shape: GraphShape | None = None
        self._captured: set[GraphShape] = set()

    def step(
        self, lanes: int, scored: bool = False, depth: int = 0, target_rows: int = 0, rejects: bool = False
    ) -> int:
        """See `StepProgram`."""
        shape = self.shape or self._shape(lanes, scored, depth, target_rows)
        self._replay(shape, lanes, allocates=target_rows > 0)
        return 0

    def close(self) -> None:
        """Nothing to give back."""

    def _replay(self, shape: GraphShape, lanes: int, *, allocates: bool) -> None:
        """A replay of a graph of this shape, with what stands in the host's rows and buffers."""
        bound = (self.rows.generation != self._rows.generation[:-1]).nonzero()[:, 0].tolist()
        self._binds.slot.fill_(self._slots)
        for name in BOUND:
            host, card = getattr(self.rows, name), getattr(self._rows, name)
            for index, slot in enumerate(bound):
                getattr(self._binds.rows, name)[index] = host[slot]
            others = [slot for slot in range(self._slots) if slot not in bound]
            card[others] = host[others]
        self._binds.slot[: len(bound)] = torch.tensor(bound, dtype=torch.int32)
        for name in INPUTS:
            getattr(self._buffers, name).copy_(getattr(self.buffers, name))
        self.scalars.lane_count.fill_(lanes)
        self.scalars.allocates.fill_(allocates)
        with nullcontext() if shape in self._captured else CaptureMode():
            self.cuda.body(shape)()
        self._captured.add(shape)
        for field in fields(StepBuffers):
            if field.name not in INPUTS or field.name == "tokens":
                host, card = getattr(self.buffers, field.name), getattr(self._buffers, field.name)
                host.copy_(card[:, : self._slots] if field.name == "confidence" else card)
        for name in ADVANCES:
            getattr(self.rows, name).copy_(getattr(self._rows, name)[:-1])
        slots = self.buffers.slot[:lanes].long()
        assert torch.equal(self.scalars.committed[:lanes], self.rows.committed[slots])
        assert torch.equal(self.scalars.ended[:lanes], self.rows.ended[slots])

    def _shape(self, lanes: int, scored: bool, depth: int, target_rows: int) -> GraphShape:
        """The smallest that such a step fits, or nearly."""
        rows = self.buffers.rows[:lanes].tolist()
        prompts = [lane for lane in self.buffers.prefill_row.tolist() if lane >= 0]
        tokens = 1 << (sum(rows[lane] for lane in prompts) - 1).bit_length() if prompts else 0
        width = depth + 1 if depth else max((rows[lane] for lane in range(lanes) if lane not in prompts), default=1)
        if target_rows:
            speculative = GraphKind.SPECULATIVE
            return GraphShape(speculative, self._slots, 0, 0, width, depth, target_rows, True, Source.DRAFT)
        if not prompts:
            source = Source.DRAFT if depth or width == 1 else Source.COPY
            return rectangular(GraphKind.SPECULATIVE, lanes, width, source=source)
        if len(prompts) == lanes:
            return GraphShape(GraphKind.SCORED_PREFILL if scored else GraphKind.PREFILL, lanes, tokens)
        return rectangular(GraphKind.MIXED, lanes, width, max(tokens, width), len(prompts))
