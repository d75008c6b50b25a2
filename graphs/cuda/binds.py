"""What a frame carries to the card beside the buffers of a step.

Owns the records of bindings and of the few numbers that a graph of fixed shape needs to know how much of it is used.
Surprising rule: bindings travel as inputs, and the graph itself writes them to the state rows before anything else; so
nothing on the host ever writes to a row, and a frame that is queued behind another cannot disturb it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..programs.rows import StateRows

BOUND = (
    "generation",
    "pending",
    "committed",
    "remaining",
    "ended",
    "page_table",
    "page_count",
    "stop_tokens",
    "stop_count",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence",
    "frequency",
    "repetition",
    "bias_tokens",
    "bias_values",
    "bias_count",
    "logprobs",
    "prompt_logprobs",
)
"""Columns of a state row that a binding writes, and that a program on a card reads."""


@dataclass(frozen=True, slots=True)
class Binds:
    """Rows to be bound: each one's `slot` int32[P], the last of the card's where there is nothing to bind, and its
    columns (`StateRows.bind` writes them on the host)."""

    slot: torch.Tensor
    rows: StateRows

    @classmethod
    def allocate(cls, prompts: int, max_model_len: int) -> Binds:
        """For so many bindings in a frame."""
        return cls(torch.zeros(prompts, dtype=torch.int32), StateRows.allocate(prompts, max_model_len))

    def apply(self, rows: StateRows) -> None:
        """Give the rows to their fresh generations."""
        slot = self.slot.long()
        for name in BOUND:
            getattr(rows, name).index_copy_(0, slot, getattr(self.rows, name))


@dataclass(frozen=True, slots=True)
class FrameScalars:
    """In: `lane_count` int32[1], the lanes in use; `allocates` int32[1], whether a ragged graph shares out its rows
    itself. Out: of each lane [L] the state row's `committed` and `ended` after the frame."""

    lane_count: torch.Tensor
    allocates: torch.Tensor
    committed: torch.Tensor
    ended: torch.Tensor

    @classmethod
    def allocate(cls, lanes: int) -> FrameScalars:
        """For frames of so many lanes."""
        one, each = (1,), (lanes,)
        return cls(*(torch.zeros(shape, dtype=torch.int32) for shape in (one, one, each, each)))
