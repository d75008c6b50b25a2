"""The lanes of a frame, as tensors of fixed shape.

Owns what a step knows of each lane before it begins. Does not own rows of a pass (`spans`). Surprising rule: a lane
that the frame does not use has the card's last state row, which is nobody's; what is written for it does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..programs.buffers import StepBuffers
from ..programs.rows import RUNNING, StateRows


@dataclass(frozen=True, slots=True)
class Lanes:
    """L lanes, int64[L] or bool[L].

    Each one's state row `slot` and position `start`; its first row among the inputs (`packed`) and the rows that it may
    have (`width`: 0 where nothing is to be done); the tokens that it has `committed` before it draws. `prompt`: it
    consumes a prompt; `running`: it consumes its pending token.
    """

    slot: torch.Tensor
    start: torch.Tensor
    packed: torch.Tensor
    width: torch.Tensor
    committed: torch.Tensor
    prompt: torch.Tensor
    running: torch.Tensor

    @classmethod
    def of(cls, rows: StateRows, buffers: StepBuffers, lane_count: torch.Tensor, lanes: int, prompts: int) -> Lanes:
        """The first `lanes` of a frame, of which up to `prompts` consume one."""
        lane = torch.arange(lanes, device=lane_count.device)
        used = lane < lane_count
        slot = torch.where(used, buffers.slot[:lanes].long(), len(rows.ended) - 1)
        length = torch.where(used, buffers.rows[:lanes].long(), 0)
        prompt = used & (lane[:, None] == buffers.prefill_row[:prompts]).any(-1)
        running = used & ~prompt & (rows.ended[slot] == RUNNING)
        width = torch.where(running, torch.minimum(length, rows.remaining[slot]), torch.where(prompt, length, 0))
        committed = rows.committed[slot].long()
        start = torch.where(prompt, buffers.start[:lanes].long(), committed - 1)
        return cls(
            slot=slot,
            start=start,
            packed=length.cumsum(0) - length,
            width=width,
            committed=torch.where(prompt, start + length, committed),
            prompt=prompt,
            running=running,
        )

    @staticmethod
    def inputs(of: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Packed inputs, where `place` may lie beyond them for what is not needed."""
        return of[place.clamp(max=len(of) - 1)].long()
