"""The step of a decoder on a card: what a graph captures.

Owns the order of a step over tensors of fixed shape: bindings, proposals, rows of the pass, draws, advance, draft. Does
not own capture or buffers. Surprising rule: the body of a shape does the same operations for every frame: how much of
the shape is used is data, and no operation depends on data but by its values; so it can be captured once.
`programs.reference` defines what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from flare.machines.graph import GraphKind, GraphShape, Source

from ..models.config import ModelConfig
from ..models.draft import DraftModel
from ..models.source import WeightSource
from ..programs.buffers import StepBuffers
from ..programs.extents import packed_rows, prompt_lanes
from ..programs.rows import StateRows
from .advance import advance
from .allocation import share_out
from .attention import Attention
from .binds import Binds, FrameScalars
from .drafting import Drafting, Pass
from .draws import Drawing
from .forward import Forward
from .lanes import Lanes
from .pages import CudaPages
from .spans import Packing


class CudaStep:
    """The programs of one model, over rows, buffers and pages that it is given, all on `device`.

    `rows` and `buffers.confidence` have one state row more than there are requests, at the end: lanes that a frame does
    not use have that.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        rows: StateRows,
        buffers: StepBuffers,
        binds: Binds,
        scalars: FrameScalars,
        kv: CudaPages,
        device: torch.device,
        dtype: torch.dtype,
        positions: int,
        attention: Attention,
        draft: DraftModel | None = None,
        draft_kv: CudaPages | None = None,
        rejects: bool = False,
    ) -> None:
        """Read the weights. `positions`: those of the longest request."""

        def forward(config: ModelConfig, source: WeightSource, kv: CudaPages, *, reads_hidden: bool = False) -> Forward:
            return Forward(
                config,
                source,
                kv,
                device=device,
                dtype=dtype,
                positions=positions,
                attention=attention,
                reads_hidden=reads_hidden,
            )

        self._rows = rows
        self._buffers = buffers
        self._binds = binds
        self._scalars = scalars
        self._pages = -(-positions // kv.page_tokens)
        self._forward = forward(config, source, kv)
        self._drawing = Drawing(self._forward, rows, buffers, rejects=rejects)
        self.drafting: Drafting | None = None
        if draft is not None and draft_kv is not None:
            drafter = forward(draft.config, draft.source, draft_kv, reads_hidden=draft.reads_hidden)
            self.drafting = Drafting(drafter, draft, rows, buffers, rejects=rejects)

    def body(self, shape: GraphShape) -> Callable[[], None]:
        """A whole replay of a graph of this shape, over the buffers."""

        def run() -> None:
            with torch.no_grad():
                self._run(shape)

        return run

    def _run(self, shape: GraphShape) -> None:
        rows, buffers, scalars = self._rows, self._buffers, self._scalars
        prompts, width = prompt_lanes(shape), min(shape.width, shape.draft_depth + 1)
        if prompts:
            self._binds.apply(rows)
        lanes = Lanes.of(rows, buffers, scalars.lane_count, shape.batch, prompts)
        table = rows.page_table[lanes.slot, : self._pages]
        drafting = self.drafting if shape.source is Source.DRAFT and width > 1 else None
        if drafting is None:
            place = lanes.packed[:, None] + torch.arange(1, width, device=table.device)
            proposals = lanes.inputs(buffers.tokens, place)
        else:
            proposals = drafting.propose(lanes, width - 1, table)
            if shape.ragged:
                lanes = self._shared_out(lanes, width - 1, shape.packed_targets)
        place = torch.arange(width - 1, device=table.device)
        verified = lanes.running[:, None] & (place + 1 < lanes.width[:, None])
        proposed = pad(torch.where(verified, proposals, -1), (0, 1), value=-1)

        if prompts or width > 1:
            packing = Packing.of(lanes.width, packed_rows(shape))
        else:
            packing = Packing.one_each(lanes.running)
        longest = max(width, shape.prefill_tokens)
        spans = self._forward.spans(packing, lanes.start, table, longest)
        residual = self._forward.residual(self._tokens(lanes, packing, proposed), spans)
        hidden = self._forward.normalized(residual)
        if shape.kind is GraphKind.SCORED_PREFILL:
            self._drawing.score_prompts(hidden)
        drawn_from = None if drafting is None else drafting.drawn_from
        token = self._drawing.draw(lanes, packing, proposed, hidden, prompts=prompts > 0, drawn_from=drawn_from)
        count, goes_on = advance(rows, buffers, scalars, lanes, proposed, token)
        if self.drafting is not None:
            self.drafting.read(lanes, table, Pass(packing, longest, residual, token, count, goes_on), prompts)

    def _shared_out(self, lanes: Lanes, depth: int, target_rows: int) -> Lanes:
        """The lanes with the rows that they get by confidence, if the frame says so."""
        joint = self._buffers.confidence[1, lanes.slot, :depth]
        shared = share_out(joint, lanes.width - 1, lanes.slot, lanes.running, target_rows)
        return replace(lanes, width=torch.where(lanes.running & (self._scalars.allocates != 0), shared, lanes.width))

    def _tokens(self, lanes: Lanes, packing: Packing, proposed: torch.Tensor) -> torch.Tensor:
        """The token int64[R] of each row."""
        lane, offset = packing.lane, packing.offset
        decoded = torch.cat((self._rows.pending[lanes.slot].long()[:, None], proposed), dim=1)
        own = decoded[lane, offset.clamp(max=proposed.shape[1])]
        given = lanes.inputs(self._buffers.tokens, lanes.packed[lane] + offset)
        return torch.where(packing.live, torch.where(lanes.prompt[lane], given, own), 0)
