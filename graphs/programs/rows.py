"""State rows: what the device remembers of the request in each slot.

Owns the tensors that a binding writes and that every later frame reads and advances. Does not own buffers of one
frame. Surprising rule: a row is never cleared; a slot's next binding overwrites all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..frames import Binding
from ..memory.pages import PAGE_TOKENS

STOP_TOKENS_MAX = 128
LOGIT_BIAS_MAX = 1024
ALTERNATIVES_MAX = 20

WAITING_MAX = 32
"""Positions that may wait for the draft: rounds that propose nothing leave theirs, and are spared its pass."""

RUNNING, ENDED_STOP, ENDED_LENGTH = 0, 1, 2

NO_TOKEN, NOT_FINITE = -1, -2
"""In place of a drawn token: none was asked for or drawn yet, or the lane's logits are no numbers to draw from."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """One row per slot (S). All int32 or float32, but `seed`, int64.

    `pending` is the drawn token that the next decode step consumes, at position `committed - 1`; NO_TOKEN while the
    prompt is not complete. `remaining` output tokens may still be drawn. `ended` is RUNNING, ENDED_STOP or
    ENDED_LENGTH. `logprobs` and `prompt_logprobs` are -1 where nothing is asked. `page_table` [S, pages of the longest
    request].

    Of the draft, if there is one: `drafted` positions have been read by it; then come `waiting` ones, of which the rows
    keep the tokens [S, WAITING_MAX] and, for a head, the target's residual stream [S, WAITING_MAX, hidden].
    """

    generation: torch.Tensor
    pending: torch.Tensor
    committed: torch.Tensor
    remaining: torch.Tensor
    ended: torch.Tensor
    page_table: torch.Tensor
    page_count: torch.Tensor
    stop_tokens: torch.Tensor
    stop_count: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor
    bias_count: torch.Tensor
    logprobs: torch.Tensor
    prompt_logprobs: torch.Tensor
    drafted: torch.Tensor
    waiting: torch.Tensor
    waiting_tokens: torch.Tensor
    waiting_hidden: torch.Tensor

    @classmethod
    def allocate(cls, slots: int, max_model_len: int, hidden: int = 0) -> StateRows:
        """Rows of nobody: every slot is ended. `hidden` is the width of what a draft head reads."""

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape, dtype=torch.int32)

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(slots, *shape)

        return cls(
            generation=torch.full((slots,), -1, dtype=torch.int64),
            pending=ints(),
            committed=ints(),
            remaining=ints(),
            ended=torch.full((slots,), ENDED_LENGTH, dtype=torch.int32),
            page_table=ints(-(-max_model_len // PAGE_TOKENS)),
            page_count=ints(),
            stop_tokens=ints(STOP_TOKENS_MAX),
            stop_count=ints(),
            temperature=floats(),
            top_k=ints(),
            top_p=floats(),
            min_p=floats(),
            seed=torch.zeros(slots, dtype=torch.int64),
            presence=floats(),
            frequency=floats(),
            repetition=floats(),
            bias_tokens=ints(LOGIT_BIAS_MAX),
            bias_values=floats(LOGIT_BIAS_MAX),
            bias_count=ints(),
            logprobs=ints(),
            prompt_logprobs=ints(),
            drafted=ints(),
            waiting=ints(),
            waiting_tokens=ints(WAITING_MAX),
            waiting_hidden=floats(WAITING_MAX, hidden),
        )

    def bind(self, slot: int, generation: int, binding: Binding) -> None:
        """Give the row to a fresh generation. The binding has been checked."""
        sampling, biases = binding.sampling, binding.sampling.logit_bias

        def put(column: torch.Tensor, value: float) -> None:
            column.numpy()[slot] = value

        def put_list(column: torch.Tensor, values: Sequence[float]) -> None:
            column.numpy()[slot, : len(values)] = values

        put(self.generation, generation)
        put(self.pending, NO_TOKEN)
        put(self.committed, 0)
        put(self.remaining, binding.output_limit)
        put(self.ended, RUNNING)
        put(self.page_count, len(binding.pages))
        put_list(self.page_table, binding.pages)
        put(self.stop_count, len(binding.stop_tokens))
        put_list(self.stop_tokens, binding.stop_tokens)
        put(self.temperature, sampling.temperature)
        put(self.top_k, sampling.top_k)
        put(self.top_p, sampling.top_p)
        put(self.min_p, sampling.min_p)
        put(self.seed, sampling.seed)
        put(self.presence, sampling.presence_penalty)
        put(self.frequency, sampling.frequency_penalty)
        put(self.repetition, sampling.repetition_penalty)
        put(self.bias_count, len(biases))
        put_list(self.bias_tokens, [token for token, _ in biases])
        put_list(self.bias_values, [value for _, value in biases])
        put(self.logprobs, -1 if binding.logprobs is None else binding.logprobs)
        put(self.prompt_logprobs, -1 if binding.prompt_logprobs is None else binding.prompt_logprobs)
        put(self.drafted, 0)
        put(self.waiting, 0)


def check_binding(binding: Binding, pages: int, table_pages: int, vocab: int) -> None:
    """Raise ValueError if a row cannot hold the binding, naming the field and its limit."""
    sampling = binding.sampling
    for name, value, limit in (
        ("pages", len(binding.pages), table_pages),
        ("stop_tokens", len(binding.stop_tokens), STOP_TOKENS_MAX),
        ("sampling.logit_bias", len(sampling.logit_bias), LOGIT_BIAS_MAX),
        ("logprobs", binding.logprobs or 0, ALTERNATIVES_MAX),
        ("prompt_logprobs", binding.prompt_logprobs or 0, ALTERNATIVES_MAX),
    ):
        if value > limit:
            raise ValueError(f"binding: {name} is {value} long or large; at most {limit}")
    if binding.initialize or binding.windows:
        raise ValueError("binding: initialize and windows need state graphs, which these programs have not")
    if any(not 0 <= page < pages for page in binding.pages):
        raise ValueError(f"binding: pages must be in [0, {pages})")
    if any(not 0 <= token < vocab for token, _ in sampling.logit_bias):
        raise ValueError(f"binding: sampling.logit_bias names a token outside [0, {vocab})")
    if not 0 <= sampling.seed < 2**63:
        raise ValueError(f"binding: sampling.seed is {sampling.seed}; it must be in [0, 2**63)")
    if sampling.top_k < 0:
        raise ValueError(f"binding: sampling.top_k is {sampling.top_k}; it must be at least 0")
