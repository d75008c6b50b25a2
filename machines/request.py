"""What a request asks of scheduling, as far as its tokens go.

Owns the records that describe a request to the scheduler, and their checks. Does not own any state (`execution`), nor
token ids, sampling or text. Surprising rule: positions where consumption must stop may cut neither an atomic span nor,
at the end of a restored prefix, an image window.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class EndReason(StrEnum):
    """What ended the output, in OpenAI's words: a stop token or string, or a limit of length."""

    STOP = "stop"
    LENGTH = "length"


class ImageWindow(msgspec.Struct, frozen=True):
    """Whole images whose features fit the prepared storage together (docs/architecture.md, "State machines").

    The prompt positions [start, end) read their features, which `operations` executions of a vision graph write.
    """

    start: int
    end: int
    operations: int


class RequestSpec(msgspec.Struct, frozen=True):
    """What scheduling needs to know of a request. Endpoints are exclusive token positions in the prompt.

    `needs_feedback`: every step reads what only the host knows (stop strings, penalties, minimum length).
    `max_tokens` 0 is for requests that only score their prompt. `initialize`: its row must be initialized first.
    `restored_tokens`: the length of the prefix whose state a restore brings back. `windows` are in order; each `spans`
    entry [start, end) is consumed within one chunk; at each of `checkpoints` an exact snapshot is taken before it goes
    on. Raises ValueError, naming the field, for what cannot be served.
    """

    client: str
    prompt_tokens: int
    max_tokens: int
    system_end: int = 0
    messages: tuple[int, ...] = ()
    scored: bool = False
    needs_feedback: bool = False
    initialize: bool = False
    restored_tokens: int = 0
    windows: tuple[ImageWindow, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError("prompt_tokens must be at least 1")
        if self.max_tokens < 0 or (self.max_tokens == 0 and not self.scored):
            raise ValueError("max_tokens must be at least 1 (0 only where the prompt is scored)")
        ends = (0, *self.messages, self.prompt_tokens)
        if any(a > b for a, b in itertools.pairwise(ends)) or not 0 <= self.system_end <= self.prompt_tokens:
            raise ValueError("endpoints must rise and not pass the prompt's end")
        if not 0 <= self.restored_tokens < self.prompt_tokens:
            raise ValueError("restored_tokens must leave at least one prompt token")
        if self.scored and self.restored_tokens:
            raise ValueError("restored_tokens must be 0 where the prompt is scored")
        ends = (0, *self.checkpoints, self.prompt_tokens + 1)
        if any(a >= b for a, b in itertools.pairwise(ends)):
            raise ValueError("checkpoints must rise within the prompt")
        if any(window.operations < 1 for window in self.windows):
            raise ValueError("windows need at least one operation each")
        _check_ranges("windows", [(window.start, window.end) for window in self.windows], self.prompt_tokens)
        _check_ranges("spans", self.spans, self.prompt_tokens)
        _check_cut("windows", [(w.start, w.end) for w in self.windows], (self.restored_tokens,))
        stops = (self.system_end, self.restored_tokens, *self.checkpoints, *(window.start for window in self.windows))
        _check_cut("spans", self.spans, stops)

    @property
    def windows_left(self) -> tuple[ImageWindow, ...]:
        """The image windows beyond the restored prefix."""
        return tuple(window for window in self.windows if window.start >= self.restored_tokens)

    @property
    def checkpoints_left(self) -> tuple[int, ...]:
        """The checkpoints beyond the restored prefix."""
        return tuple(position for position in self.checkpoints if position > self.restored_tokens)

    @property
    def needs_state_row(self) -> bool:
        """Whether its state is saved on the way, so that it has a state row from its admission on."""
        return len(self.windows_left) > 1 or bool(self.checkpoints_left)


def _check_ranges(field: str, ranges: Sequence[tuple[int, int]], prompt_tokens: int) -> None:
    """Raise ValueError unless ranges [start, end) lie in the prompt, in order and apart."""
    ends = [0, *itertools.chain.from_iterable(ranges), prompt_tokens]
    if any(a > b for a, b in itertools.pairwise(ends)) or any(start == end for start, end in ranges):
        raise ValueError(f"{field} must be ranges within the prompt, in order and apart")


def _check_cut(field: str, ranges: Sequence[tuple[int, int]], stops: Sequence[int]) -> None:
    """Raise ValueError if consumption must stop inside one of the ranges."""
    for start, end in ranges:
        if any(start < stop < end for stop in stops):
            raise ValueError(f"{field}: [{start}, {end}) is cut by a position where consumption must stop")
