"""What the API asks of the engine, and what comes back.

Owns the records between the HTTP layer and the engine. Does not own wire formats (`flare/server/wire`) or the device's
records (`flare/graphs/frames`). Surprising rule: every number in here has been validated; nothing behind this line
checks a client's input again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare.graphs.frames import Sampling
from flare.machines.request import EndReason


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Exact token endpoints of a prompt: exclusive ends. `system_end` 0 means no system prompt; `messages` rise and do
    not pass the prompt's end, which is implied by its length."""

    system_end: int = 0
    messages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. `n` choices are n of these.

    `name` is for logs (such as `cmpl-…-0`), `client` the account whose fairness is kept. `max_tokens` is at least 1 and
    fits the context; only scoring requests (`prompt_logprobs` not None) may ask for 0. `stop_token_ids` holds what
    the client named; eos is added by the engine unless `ignore_eos`. `stop` strings end the visible text before their
    first occurrence.
    """

    name: str
    client: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    endpoints: Endpoints = Endpoints()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its natural-log probability (None for the first prompt token) and alternatives, best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A step of a request's visible output.

    `text` is valid UTF-8 and may be empty. `tokens` are the output tokens that this step accounts for, with
    scores where asked for, each with `offsets` = index of its first character in the whole visible output text.
    `prompt_scores` comes once, with the first delta of a scoring request. `completion_tokens` is the running total (a
    final eos or stop token counts). The last delta has `finish_reason`; `stop_reason` is the stop string or
    token id that ended it.
    """

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    offsets: tuple[int, ...] = ()
    prompt_scores: tuple[ScoredToken, ...] | None = None
    completion_tokens: int = 0
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what all of `deltas` say in turn."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1] if deltas else Delta()
    return Delta(
        text="".join([delta.text for delta in deltas]),
        tokens=tuple([token for delta in deltas for token in delta.tokens]),
        offsets=tuple([offset for delta in deltas for offset in delta.offsets]),
        prompt_scores=next((delta.prompt_scores for delta in deltas if delta.prompt_scores is not None), None),
        completion_tokens=last.completion_tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
