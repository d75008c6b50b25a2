"""The fixed inputs and outputs of a replay.

Owns the tensors that a frame is written to and that its results are read from; one set serves every graph, since
replays follow one another. Does not own state rows. Surprising rule: a decode lane has a row among the packed ones like
any other, but no token or position in it; the program takes both from its state row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .extents import Extents
from .rows import ALTERNATIVES_MAX, STOP_TOKENS_MAX

NO_LANE = -1
"""In `prefill_row`: no further lane consumes a prompt."""


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs and outputs for at most L lanes, P of them with prompts, R packed rows, W target positions of a lane and S
    request slots. int32, but log-probabilities and probabilities, which are float32.

    Inputs: of each lane its `slot`, `start` position, query length `rows`, whether it `emits`; its history (`seen`
    distinct tokens: `history_tokens`, `history_counts` [L, H]) and `banned_count` `banned` tokens
    [L, STOP_TOKENS_MAX], which its first `banned_rows` draws may not give. `prefill_row` [P]: the lanes that consume a
    prompt, rising, then -1; all others decode. A lane's packed rows begin at the sum of the query lengths before it. Of
    each packed row of a prompt its `tokens` and `targets` (-1: not scored); of a decoding lane its proposals in
    `tokens`, behind the row of its pending token: those that it is given, or those that the draft made.
    Outputs: of each lane how many tokens it drew (`count`), of how many positions (`verified`), and [L, W] each `token`
    (the first may be NO_TOKEN or NOT_FINITE), its `logprob`, alternatives [L, W, ALTERNATIVES_MAX] and, of rounds that
    draw by rejection, the `survival` of each verified prefix. `confidence` [2, S, W - 1] has the conditional and the
    joint probability of each proposal made; `draft_probabilities` [L, W - 1, V] what they were drawn from, where that
    is needed. Of each packed row of a scored prompt the target's log-probability (NaN for logits that are not finite)
    and alternatives [R, ALTERNATIVES_MAX].
    """

    slot: torch.Tensor
    start: torch.Tensor
    rows: torch.Tensor
    emits: torch.Tensor
    prefill_row: torch.Tensor
    seen: torch.Tensor
    history_tokens: torch.Tensor
    history_counts: torch.Tensor
    banned_count: torch.Tensor
    banned: torch.Tensor
    banned_rows: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    count: torch.Tensor
    verified: torch.Tensor
    token: torch.Tensor
    logprob: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    row_logprob: torch.Tensor
    row_top_tokens: torch.Tensor
    row_top_logprobs: torch.Tensor
    survival: torch.Tensor
    confidence: torch.Tensor
    draft_probabilities: torch.Tensor

    @classmethod
    def allocate(cls, extents: Extents, history: int, slots: int = 1, draft_vocab: int = 0) -> StepBuffers:
        """Buffers for frames of these extents, whose lanes have seen up to `history` distinct tokens. `draft_vocab`:
        the tokens that proposals are drawn from, if what is drawn from must be kept."""
        lanes, prompts, rows, width = extents
        depth = max(1, width - 1)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32)

        return cls(
            slot=ints(lanes),
            start=ints(lanes),
            rows=ints(lanes),
            emits=ints(lanes),
            prefill_row=torch.full((prompts,), NO_LANE, dtype=torch.int32),
            seen=ints(lanes),
            history_tokens=ints(lanes, history),
            history_counts=ints(lanes, history),
            banned_count=ints(lanes),
            banned=ints(lanes, STOP_TOKENS_MAX),
            banned_rows=ints(lanes),
            tokens=ints(rows),
            targets=ints(rows),
            count=ints(lanes),
            verified=ints(lanes),
            token=ints(lanes, width),
            logprob=torch.zeros(lanes, width),
            top_tokens=ints(lanes, width, ALTERNATIVES_MAX),
            top_logprobs=torch.zeros(lanes, width, ALTERNATIVES_MAX),
            row_logprob=torch.zeros(rows),
            row_top_tokens=ints(rows, ALTERNATIVES_MAX),
            row_top_logprobs=torch.zeros(rows, ALTERNATIVES_MAX),
            survival=torch.zeros(lanes, width),
            confidence=torch.zeros(2, slots, depth),
            draft_probabilities=torch.zeros(lanes, depth, draft_vocab),
        )

    @staticmethod
    def bytes_for(extents: Extents, history: int) -> int:
        """Bytes that `allocate` takes."""
        with torch.device("meta"):
            made = StepBuffers.allocate(extents, history)
        return sum(getattr(made, field.name).nbytes for field in fields(made))
