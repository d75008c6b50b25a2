"""Where a frame's inputs and outputs lie, on the card and in pinned memory.

Owns the layout: one block of inputs and one of outputs, the same on both sides, with the records of a step as views of
them. Does not own what is written to them. Surprising rule: a block is ordered by how seldom its parts are needed, so
that one copy of its beginning is all that a frame takes: a plain decode sends the first few hundred bytes, and what
only penalties read, the largest by far, lies at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch

from ..programs.buffers import StepBuffers
from ..programs.extents import Extents
from ..programs.rows import StateRows
from .binds import Binds, FrameScalars

ALIGNMENT = 64


class Inputs(IntEnum):
    """How much of the inputs a frame needs: each with all before it."""

    LANES = 0
    TOKENS = 1
    PROMPTS = 2
    BINDINGS = 3
    BANS = 4
    HISTORY = 5


class Outputs(IntEnum):
    """How much of the outputs a frame needs."""

    TOKENS = 0
    SCORES = 1
    PROMPT_SCORES = 2


_INPUTS: dict[str, Inputs] = {
    **dict.fromkeys(("slot", "start", "rows", "emits", "seen", "banned_count", "banned_rows"), Inputs.LANES),
    **dict.fromkeys(("prefill_row", "lane_count", "allocates"), Inputs.LANES),
    "tokens": Inputs.TOKENS,
    "targets": Inputs.PROMPTS,
    "banned": Inputs.BANS,
}
_OUTPUTS: dict[str, Outputs] = {
    **dict.fromkeys(("count", "verified", "token", "survival", "confidence", "committed", "ended"), Outputs.TOKENS),
    **dict.fromkeys(("logprob", "top_tokens", "top_logprobs"), Outputs.SCORES),
    **dict.fromkeys(("row_logprob", "row_top_tokens", "row_top_logprobs"), Outputs.PROMPT_SCORES),
}
_HISTORY = ("history_tokens", "history_counts")
_ON_CARD_ALONE = "draft_probabilities"


class _Field(NamedTuple):
    """A part of a block."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    nbytes: int

    def view(self, block: torch.Tensor) -> torch.Tensor:
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Records:
    """What a step reads and writes, as views of two blocks."""

    buffers: StepBuffers
    binds: Binds
    scalars: FrameScalars


class Layout:
    """Both blocks for frames of these extents. Lanes have seen `history` distinct tokens at most; the state rows are
    `slots` in all; `draft_vocab` is that of `StepBuffers.allocate`."""

    def __init__(self, extents: Extents, *, max_model_len: int, history: int, slots: int, draft_vocab: int = 0) -> None:
        self.extents = extents
        with torch.device("meta"):
            buffers = StepBuffers.allocate(extents, history, slots, draft_vocab)
            binds = Binds.allocate(extents.prompts, max_model_len)
            scalars = FrameScalars.allocate(extents.lanes)
        loose = {**_tensors(buffers), **_tensors(scalars)}
        self._draft_probabilities = loose.pop(_ON_CARD_ALONE)
        tokens, counts = (loose.pop(name) for name in _HISTORY)
        both = torch.empty(len(tokens), 2, history, dtype=torch.int32, device="meta")
        assert tokens.shape == counts.shape == both[:, 0].shape
        sections: dict[Inputs, dict[str, torch.Tensor]] = {part: {} for part in Inputs}
        results: dict[Outputs, dict[str, torch.Tensor]] = {part: {} for part in Outputs}
        for name, tensor in loose.items():
            if name in _INPUTS:
                sections[_INPUTS[name]][name] = tensor
            else:
                results[_OUTPUTS[name]][name] = tensor
        sections[Inputs.LANES]["bind.slot"] = binds.slot  # always: else a graph would bind again what is there
        sections[Inputs.BINDINGS].update({f"bind.{name}": tensor for name, tensor in _tensors(binds.rows).items()})
        sections[Inputs.HISTORY]["history"] = both
        self._inputs, self._input_ends, self.input_bytes = _lay_out(sections.values())
        self._outputs, self._output_ends, self.output_bytes = _lay_out(results.values())
        self._history_lane = 2 * history * 4

    @property
    def card_bytes(self) -> int:
        """What `on_card` takes."""
        return self.input_bytes + self.output_bytes + self._draft_probabilities.nbytes

    def inputs_to(self, part: Inputs, history_lanes: int = 0) -> int:
        """The bytes of inputs up to a part; of the last, the history of so many lanes."""
        if part is Inputs.HISTORY:
            return self._inputs["history"].offset + history_lanes * self._history_lane
        return self._input_ends[part]

    def outputs_to(self, part: Outputs) -> int:
        """The bytes of outputs up to a part."""
        return self._output_ends[part]

    def records(self, inputs: torch.Tensor, outputs: torch.Tensor, *, on_card: bool) -> Records:
        """The records over uint8 blocks. `on_card`: with the working memory that no frame sends or fetches."""
        views = {name: field.view(inputs) for name, field in self._inputs.items()}
        views |= {name: field.view(outputs) for name, field in self._outputs.items()}
        both = views.pop("history")
        views["history_tokens"], views["history_counts"] = both[:, 0], both[:, 1]
        shape = self._draft_probabilities.shape if on_card else torch.Size((0,))
        views[_ON_CARD_ALONE] = torch.zeros(shape, device=inputs.device)
        rows = StateRows(**{field.name: views.pop(f"bind.{field.name}") for field in fields(StateRows)})
        binds = Binds(views.pop("bind.slot"), rows)
        scalars = FrameScalars(**{field.name: views.pop(field.name) for field in fields(FrameScalars)})
        return Records(StepBuffers(**views), binds, scalars)


def _tensors(record: StepBuffers | StateRows | FrameScalars) -> dict[str, torch.Tensor]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _lay_out(sections: Iterable[dict[str, torch.Tensor]]) -> tuple[dict[str, _Field], list[int], int]:
    """Each tensor's place, where each section ends, and the bytes of all."""
    placed: dict[str, _Field] = {}
    ends: list[int] = []
    at = 0
    for section in sections:
        for name, tensor in section.items():
            nbytes = prod(tensor.shape) * tensor.dtype.itemsize
            placed[name] = _Field(name, tensor.shape, tensor.dtype, at, nbytes)
            at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        ends.append(at)
    return placed, ends, at
