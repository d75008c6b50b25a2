"""The CPU device.

Owns the state rows, buffers, pages and program of one model, and the order in which frames reach them. Does not own
the numerics (`models`, `programs`) or the thread (`worker`). Surprising rule: all graphs of the catalog share one set
of buffers and one program, since lengths are data and replays never overlap; a graph's capacity is only checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import Fence, PageId, RequestHandle

from ..device import DeviceLost, OnCompletion, OnProgress
from ..frames import Binding, Completion, Frame, LaneInput, Sampling
from ..memory.pages import PAGE_TOKENS, KvPages, page_bytes
from ..models.config import ModelConfig
from ..models.draft import DraftModel
from ..models.source import WeightSource
from ..programs.buffers import StepBuffers
from ..programs.decoder import Decoder
from ..programs.drafting import Drafting
from ..programs.extents import decodes, extents_of, prompt_lanes
from ..programs.frame_io import FrameIo
from ..programs.reference import ReferenceStep
from ..programs.rows import StateRows
from ..programs.step import StepProgram
from ..weights.errors import ModelError
from .build import CannotCompile, native_library
from .native import NativeStep, unsupported
from .plan import DType, MemoryPlan, kv_dtype, plan_memory
from .worker import Worker

MIXED_WARM_TOKENS = 64


class CpuDevice:
    """A `Device` that runs a decoder of the Llama family on CPU cores.

    `request_slots` state rows; requests of at most `max_model_len` tokens; `kv_bytes` of KV pages. `dtype` "auto" is
    the fastest mix that keeps quality, "float32" the exact reference. `threads` cores are used. `eager` runs plain
    torch without compiling anything; `cache_dir` keeps compiled code between starts. `warn` is called with sentences
    for people. Raises ValueError, naming the argument, for what cannot work.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        request_slots: int,
        max_model_len: int,
        kv_bytes: int,
        dtype: DType,
        threads: int,
        eager: bool,
        cache_dir: Path,
        warn: Callable[[str], None],
        draft: DraftModel | None = None,
        rejects: bool = False,
    ) -> None:
        for name, value in (
            ("request_slots", request_slots),
            ("max_model_len", max_model_len),
            ("threads", threads),
        ):
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        self._config = config
        self._weights = weights
        self._request_slots = request_slots
        self._max_model_len = max_model_len
        self._kv_bytes = kv_bytes
        self._dtype: DType = dtype
        self._threads = threads
        self._eager = eager
        self._cache_dir = cache_dir
        self._warn = warn
        self._draft = draft
        self._rejects = rejects
        self._graphs: frozenset[GraphShape] = frozenset()
        self._plan: MemoryPlan | None = None
        self._program: StepProgram | None = None
        self._io: FrameIo | None = None
        self._worker: Worker | None = None

    @property
    def request_slots(self) -> int:
        """State rows: a lane's slot is below this."""
        return self._request_slots

    @property
    def pages(self) -> int:
        """Pages of the KV cache."""
        draft = None if self._draft is None else self._draft.config
        return self._kv_bytes // page_bytes(self._config, kv_dtype(self._dtype), draft)

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds."""
        return PAGE_TOKENS

    @property
    def program(self) -> StepProgram:
        """The program that runs every graph; for tests and measurements, with no frame in flight."""
        if self._program is None:
            raise DeviceLost("the CPU device is not prepared, or closed")
        return self._program

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """See `Device.prepare`. Every graph is run once, so that nothing is cold when serving starts.

        Raises ValueError for a cache too small for one request or a graph that this device has no program for, and
        `ModelError` for weights that give no numbers.
        """
        for shape in catalog:
            if not (decodes(shape) or prompt_lanes(shape)):
                raise ValueError(f"catalog: the CPU device has no program for {shape.name}")
            if shape.width > 1 and shape.source is Source.DRAFT and self._draft is None:
                raise ValueError(f"catalog: {shape.name} makes proposals, and there is no draft")
        torch.set_num_threads(self._threads)
        self._plan = plan_memory(
            self._config,
            self._weights,
            catalog,
            max_model_len=self._max_model_len,
            kv_bytes=self._kv_bytes,
            dtype=self._dtype,
            draft=None if self._draft is None else self._draft.config,
        )
        draft = self._draft
        hidden = self._config.hidden if draft is not None and draft.reads_hidden else 0
        rows = StateRows.allocate(self._request_slots, self._max_model_len, hidden)
        kept = 0 if draft is None or not self._rejects else draft.config.vocab
        buffers = StepBuffers.allocate(extents_of(catalog), self._max_model_len, self._request_slots, kept)
        kv = KvPages.allocate(self._config, self._plan.pages, kv_dtype(self._dtype))
        self._program = self._build(rows, buffers, kv)
        self._io = FrameIo(rows, buffers, self._plan.pages, self._config.vocab)
        self._graphs = frozenset(catalog)
        for index, shape in enumerate(catalog):
            try:
                if shape.width == 1 or not isinstance(self._program, ReferenceStep):  # plain torch has nothing to warm
                    self._warm(shape)
            except FloatingPointError as error:
                raise ModelError("the weights give logits that are not finite: take an undamaged model") from error
            progress(shape, index + 1, len(catalog))

    def start(self, on_completion: OnCompletion) -> None:
        """See `Device.start`."""
        if self._program is None or self._worker is not None:
            raise DeviceLost("the CPU device must be prepared, and started once")
        self._worker = Worker(self._run, on_completion)

    def submit(self, frame: Frame) -> None:
        """See `Device.submit`."""
        if self._worker is None:
            raise DeviceLost("the CPU device has not been started")
        self._worker.submit(frame)

    def close(self) -> None:
        """See `Device.close`."""
        if self._worker is not None:
            self._worker.close()
        if self._program is not None:
            self._program.close()
        self._program = None
        self._io = None

    def _build(self, rows: StateRows, buffers: StepBuffers, kv: KvPages) -> StepProgram:
        """The native program for "auto", unless it is not wanted or cannot be; else plain torch."""
        draft, draft_kv = self._draft, None
        if draft is not None:
            draft_kv = KvPages.allocate(draft.config, kv.keys.shape[1], kv_dtype(self._dtype))
        if self._dtype == "auto" and not self._eager:
            try:
                if reason := unsupported(self._config):
                    raise CannotCompile(reason)
                if draft is not None and (reason := unsupported(draft.config)):
                    raise CannotCompile(f"{draft.name}: {reason}")
                library = native_library(self._cache_dir)
                return NativeStep(
                    library, self._config, self._weights, rows, buffers, kv, self._threads, draft, draft_kv
                )
            except CannotCompile as error:
                self._warn(f"{error}. Running plain torch in bfloat16 instead, several times slower.")
        dtype, longest = torch.float32 if self._dtype == "float32" else torch.bfloat16, self._max_model_len
        drafting = None
        if draft is not None and draft_kv is not None:
            decoder = Decoder(draft.config, draft.source, longest, dtype, reads_hidden=draft.reads_hidden)
            drafting = Drafting(decoder, draft_kv, rows, buffers, draft.kept, self._config.vocab)
        return ReferenceStep(Decoder(self._config, self._weights, longest, dtype), rows, buffers, kv, drafting)

    def _run(self, frame: Frame) -> Completion:
        """Run one frame on the calling thread. Raises whatever went wrong, with nothing of other requests changed."""
        if frame.shape not in self._graphs:
            raise ValueError(f"frame {frame.fence}: graph {frame.shape.name} was not prepared")
        return self._replay(frame)

    def _replay(self, frame: Frame) -> Completion:
        assert self._io is not None
        self._io.check(frame)
        self._io.write(frame)
        shape = frame.shape
        depth = shape.draft_depth if shape.source is Source.DRAFT else 0
        device_ns = self.program.step(
            len(frame.lanes),
            shape.kind is GraphKind.SCORED_PREFILL,
            depth,
            shape.packed_targets if frame.allocates else 0,
            self._rejects,
        )
        confidence = self.program.buffers.confidence.numpy()[:, :, :depth].copy() if depth else None
        results = self._io.read(frame, survival=self._rejects)
        return Completion(frame.fence, device_ns, results, confidence=confidence)

    def _warm(self, shape: GraphShape) -> None:
        """Run a graph on rows and pages that nobody owns yet; page 0 stands for all.

        At its full extent, but for mixed and wide ones: their rows go through nothing that prefill, decode and one lane
        of proposals have left cold, and there are many of them.
        """
        table = (PageId(0),) * -(-self._max_model_len // PAGE_TOKENS)
        binding = Binding(table, Sampling(temperature=0.0), (), shape.width + 2)
        lanes_max = shape.batch if shape.width == 1 else 1
        handles = [RequestHandle(slot, -2) for slot in range(min(lanes_max, self._request_slots))]
        prompts = min(prompt_lanes(shape), len(handles), shape.prefill_tokens)
        tokens = MIXED_WARM_TOKENS if shape.kind is GraphKind.MIXED else shape.prefill_tokens
        each = min(tokens // prompts, self._max_model_len) if prompts else 0
        lanes = [LaneInput(handle, 0, True, np.zeros(each, np.int32), binding=binding) for handle in handles[:prompts]]
        if decodes(shape):
            width = min(shape.width, shape.packed_targets // shape.batch) if shape.packed_targets else 1
            for handle in handles[prompts:]:
                first = LaneInput(handle, 0, True, np.zeros(1, np.int32), binding=binding)
                self._replay(Frame(Fence(0), GraphShape(GraphKind.PREFILL, 1, 1), (first,)))
                given = np.zeros(width - 1, np.int32) if shape.source is Source.COPY and width > 1 else None
                lanes.append(LaneInput(handle, 1, True, width=width, proposals=given))
        self._replay(Frame(Fence(0), shape, tuple(lanes)))
