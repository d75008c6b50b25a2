"""A program driven by hand, without a device or a thread.

Owns rows, buffers and pages of one program, and gives slots their pages. Surprising rule: pages are dealt out in the
order that the test asks for, so that indirection is part of every comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from flare.cache import cache_dir
from flare.graphs.cpu.build import native_library
from flare.graphs.cpu.native import NativeStep
from flare.graphs.frames import Binding, Frame, History, LaneInput, LaneResult, Sampling
from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import Int4Groups, WeightSource
from flare.graphs.programs.buffers import StepBuffers
from flare.graphs.programs.decoder import Decoder
from flare.graphs.programs.drafting import Drafting
from flare.graphs.programs.extents import Extents
from flare.graphs.programs.frame_io import FrameIo
from flare.graphs.programs.reference import ReferenceStep
from flare.graphs.programs.rows import StateRows
from flare.graphs.programs.step import StepProgram
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import Fence, PageId, RequestHandle

GREEDY = Sampling(temperature=0.0)
ROWS = 128


class Make(Protocol):
    """Builds a program over rows, buffers and so many pages, with a draft or without."""

    def __call__(
        self,
        config: ModelConfig,
        source: WeightSource,
        rows: StateRows,
        buffers: StepBuffers,
        pages: int,
        draft: DraftModel | None = None,
    ) -> StepProgram:
        """The program."""
        ...


@dataclass(frozen=True)
class Tensors:
    """A weight source over tensors in memory, none of them stored in four bits."""

    tensors: Mapping[str, torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        """A float32 tensor by its Hugging Face name."""
        return self.tensors[name].float()

    def int4_group32(self, name: str) -> Int4Groups | None:
        """None is."""
        return None


def reference(
    config: ModelConfig,
    source: WeightSource,
    rows: StateRows,
    buffers: StepBuffers,
    pages: int,
    draft: DraftModel | None = None,
) -> ReferenceStep:
    """The float32 program."""
    longest, drafting = rows.page_table.shape[1] * PAGE_TOKENS, None
    if draft is not None:
        drafter = Decoder(draft.config, draft.source, longest, torch.float32, reads_hidden=draft.reads_hidden)
        draft_kv = KvPages.allocate(draft.config, pages, torch.float32)
        drafting = Drafting(drafter, draft_kv, rows, buffers, draft.kept, config.vocab)
    decoder = Decoder(config, source, longest, torch.float32)
    return ReferenceStep(decoder, rows, buffers, KvPages.allocate(config, pages, torch.float32), drafting)


def native(
    config: ModelConfig,
    source: WeightSource,
    rows: StateRows,
    buffers: StepBuffers,
    pages: int,
    draft: DraftModel | None = None,
    threads: int = 2,
    library: Path | None = None,
) -> NativeStep:
    """The compiled program; `library` unless it is the one for this CPU."""
    kv = KvPages.allocate(config, pages, torch.bfloat16)
    draft_kv = None if draft is None else KvPages.allocate(draft.config, pages, torch.bfloat16)
    library = native_library(cache_dir()) if library is None else library
    return NativeStep(library, config, source, rows, buffers, kv, threads, draft, draft_kv)


@dataclass
class Driver:
    """One program with `slots` slots of at most `max_model_len` tokens, and room for `prompt_rows` of them at once.
    With a `draft`, or proposals that are given, rounds verify up to `width` positions, by rejection if it `rejects`."""

    make: Make
    config: ModelConfig
    source: WeightSource
    slots: int = 4
    max_model_len: int = 256
    shuffle: int | None = None
    prompt_rows: int = ROWS
    draft: DraftModel | None = None
    width: int = 1
    rejects: bool = False
    program: StepProgram = field(init=False)

    def __post_init__(self) -> None:
        """Allocate everything; `shuffle` seeds the order of pages (None: rising)."""
        each = -(-self.max_model_len // PAGE_TOKENS)
        draft, vocab = self.draft, self.config.vocab if self.draft is None else self.draft.config.vocab
        hidden = self.config.hidden if draft is not None and draft.reads_hidden else 0
        rows = StateRows.allocate(self.slots, self.max_model_len, hidden)
        packed = max(self.prompt_rows + (self.slots - 1) * self.width, self.slots * self.width)
        extents = Extents(self.slots, self.slots, packed, self.width)
        buffers = StepBuffers.allocate(extents, self.max_model_len, self.slots, vocab if self.rejects else 0)
        self.program = self.make(self.config, self.source, rows, buffers, each * self.slots, draft)
        self._io = FrameIo(rows, buffers, each * self.slots, self.config.vocab)
        order = np.arange(each * self.slots)
        if self.shuffle is not None:
            np.random.default_rng(self.shuffle).shuffle(order)
        self._pages = [tuple(PageId(int(page)) for page in part) for part in order.reshape(self.slots, each)]
        self._generation = 0

    def run(self, shape: GraphShape, lanes: Sequence[LaneInput], *, allocates: bool = False) -> tuple[LaneResult, ...]:
        """One checked frame, written, run and read."""
        frame = Frame(Fence(1), shape, tuple(lanes), allocates)
        self._io.check(frame)
        self._io.write(frame)
        depth = shape.draft_depth if shape.source is Source.DRAFT else 0
        targets = shape.packed_targets if allocates else 0
        self.program.step(len(lanes), shape.kind is GraphKind.SCORED_PREFILL, depth, targets, self.rejects)
        return self._io.read(frame, survival=self.rejects)

    def prompt(
        self,
        slot: int,
        ids: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        chunk: int | None = None,
        limit: int = 64,
        stop: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        history: History | None = None,
    ) -> tuple[RequestHandle, list[LaneResult]]:
        """Prefill a fresh generation in chunks of `chunk` tokens, scored if `prompt_logprobs` is not None."""
        handle, binding = self.bind(slot, sampling, limit=limit)
        binding = replace(binding, stop_tokens=stop, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        kind = GraphKind.PREFILL if prompt_logprobs is None else GraphKind.SCORED_PREFILL
        results: list[LaneResult] = []
        for start in range(0, len(ids), chunk or self.prompt_rows):
            part = np.array(ids[start : start + (chunk or self.prompt_rows)], np.int32)
            end = start + len(part)
            target = ids[end] if end < len(ids) else None
            bound = binding if start == 0 else None
            lane = LaneInput(handle, start, target is None, part, target, bound, history if target is None else None)
            results.extend(self.run(GraphShape(kind, 1, self.prompt_rows), [lane]))
        return handle, results

    def decode(
        self, handles: Sequence[RequestHandle], histories: Sequence[History | None] | None = None
    ) -> tuple[LaneResult, ...]:
        """One decode step over these rows, in this order."""
        notes = histories or [None] * len(handles)
        lanes = [LaneInput(handle, 0, True, history=note) for handle, note in zip(handles, notes, strict=True)]
        return self.run(GraphShape(GraphKind.DECODE, self.slots), lanes)

    def bind(self, slot: int, sampling: Sampling = GREEDY, *, limit: int = 64) -> tuple[RequestHandle, Binding]:
        """A fresh generation of a slot, and the binding that its first lane carries."""
        self._generation += 1
        binding = Binding(self._pages[slot], sampling, (), limit)
        return RequestHandle(slot, self._generation), binding

    def generate(self, slot: int, ids: Sequence[int], sampling: Sampling = GREEDY, *, limit: int = 16) -> list[int]:
        """A whole answer, alone."""
        handle, results = self.prompt(slot, ids, sampling, limit=limit)
        tokens = list(results[-1].tokens)
        while len(tokens) < limit:
            tokens.extend(self.decode([handle])[0].tokens)
        return tokens
