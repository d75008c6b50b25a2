"""How far a step takes each lane.

Owns the acceptance of proposals, the advance of the state rows and the outputs that tell of it. Does not own draws.
Surprising rule: a lane whose logits are no numbers advances nothing, and neither do lanes that drew nothing; their rows
are written all the same, with what they had.
"""

from __future__ import annotations

import torch

from ..programs.buffers import StepBuffers
from ..programs.rows import ENDED_LENGTH, ENDED_STOP, NOT_FINITE, RUNNING, StateRows
from .binds import FrameScalars
from .lanes import Lanes


def advance(
    rows: StateRows,
    buffers: StepBuffers,
    scalars: FrameScalars,
    lanes: Lanes,
    proposed: torch.Tensor,
    token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept what was `proposed` int64[L, W] (-1: nothing) as far as it is the `token` int64[L, W] that was drawn
    (NO_TOKEN: none). Returns how many tokens each lane committed, int64[L], and whether more may follow."""
    count, slot = len(token), lanes.slot
    stop = torch.arange(rows.stop_tokens.shape[1], device=slot.device) < rows.stop_count[slot][:, None]
    stops = ((token[:, :, None] == rows.stop_tokens[slot][:, None]) & stop[:, None]).any(-1)
    accepted = (token == proposed) & (proposed >= 0) & ~stops
    last = accepted.long().cumprod(1).sum(1, keepdim=True)
    pending, stopped = token.gather(1, last)[:, 0], stops.gather(1, last)[:, 0]
    failed = pending == NOT_FINITE
    took = (token[:, 0] >= 0) & ~failed
    drawn = torch.where(took, last[:, 0] + 1, 0)
    remaining = rows.remaining[slot] - drawn
    ended = torch.where(stopped, ENDED_STOP, torch.where(remaining <= 0, ENDED_LENGTH, RUNNING))
    ended = torch.where(took, ended, rows.ended[slot])
    committed = lanes.committed + drawn
    for column, value in (
        (rows.pending, torch.where(took, pending, rows.pending[slot])),
        (rows.committed, committed),
        (rows.remaining, remaining),
        (rows.ended, ended),
    ):
        column.index_copy_(0, slot, value.int())
    for output, value in (
        (scalars.committed, committed),
        (scalars.ended, ended),
        (buffers.count, drawn),
        (buffers.verified, torch.where(took & lanes.running, lanes.width, 0)),
    ):
        output[:count].copy_(value)
    buffers.token[:count, : token.shape[1]].copy_(token)
    buffers.token[:count, 0].masked_fill_(failed, NOT_FINITE)
    return drawn, took & (ended == RUNNING)
