"""What a frame gave, read from the buffers of its step.

Owns the way from outputs to `LaneResult`s. Does not own where a row stands: that it is told, because the rows of a card
are not at hand. Surprising rule: one lane without finite logits fails its whole frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flare.machines.graph import GraphKind
from flare.machines.request import EndReason

from ..frames import Frame, LaneInput, LaneResult, TokenScore
from .buffers import StepBuffers
from .rows import ENDED_LENGTH, ENDED_STOP, NOT_FINITE, RUNNING, StateRows

_ENDED = {RUNNING: None, ENDED_STOP: EndReason.STOP, ENDED_LENGTH: EndReason.LENGTH}


class LaneState(NamedTuple):
    """The state row of a lane after its frame (`committed`, `ended`), and the alternatives that were asked of it
    (`logprobs`, `prompt_logprobs`: -1 where nothing was)."""

    committed: int
    ended: int
    logprobs: int
    prompt_logprobs: int


class FrameResults:
    """Reads results from one set of buffers."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffer = arrays(buffers)

    def read(self, frame: Frame, states: Sequence[LaneState], *, survival: bool = False) -> tuple[LaneResult, ...]:
        """The results of the frame that has just run, with the `survival` of what it verified if it drew by rejection.
        Raises FloatingPointError if the model gave no numbers."""
        scored = frame.shape.kind is GraphKind.SCORED_PREFILL
        buffer, results, first = self._buffer, [], 0
        for index, (lane, state) in enumerate(zip(frame.lanes, states, strict=True)):
            count, verified = int(buffer.count[index]), int(buffer.verified[index])
            if buffer.token[index, 0] == NOT_FINITE:
                raise _not_finite(frame, lane)
            result = LaneResult(
                handle=lane.handle,
                committed=state.committed,
                tokens=tuple(buffer.token[index, :count].tolist()),
                ended=_ENDED[state.ended] if count else None,
                scores=self._scores(index, count, state.logprobs) if count and state.logprobs >= 0 else None,
                prompt_scores=self._prompt_scores(max(state.prompt_logprobs, 0), first, lane) if scored else None,
                verified=verified,
                survival=tuple(buffer.survival[index, : verified - 1].tolist()) if survival and verified > 1 else None,
            )
            if any(math.isnan(score.logprob) for score in result.prompt_scores or ()):
                raise _not_finite(frame, lane)
            results.append(result)
            first += query_length(lane)
        return tuple(results)

    def _scores(self, index: int, count: int, alternatives: int) -> tuple[TokenScore, ...]:
        buffer = self._buffer
        tops = buffer.top_tokens[index, :count, :alternatives], buffer.top_logprobs[index, :count, :alternatives]
        return tuple([_token_score(*each) for each in zip(buffer.logprob[index, :count], *tops, strict=True)])

    def _prompt_scores(self, alternatives: int, first: int, lane: LaneInput) -> tuple[TokenScore, ...]:
        """Scores of the chunk's targets; the last row of a prompt has none."""
        assert lane.tokens is not None
        buffer = self._buffer
        end = first + len(lane.tokens) - (lane.target is None)
        return tuple(
            _token_score(
                buffer.row_logprob[row],
                buffer.row_top_tokens[row, :alternatives],
                buffer.row_top_logprobs[row, :alternatives],
            )
            for row in range(first, end)
        )


def arrays(record: StateRows | StepBuffers) -> SimpleNamespace:
    """The memory of a record's tensors as NumPy arrays, whose single elements are far cheaper to reach."""
    return SimpleNamespace(**{field.name: getattr(record, field.name).numpy() for field in fields(record)})


def query_length(lane: LaneInput) -> int:
    """Packed rows of a lane: its prompt tokens, or its pending token and the proposals behind it."""
    return lane.width if lane.tokens is None else len(lane.tokens)


def _not_finite(frame: Frame, lane: LaneInput) -> FloatingPointError:
    where = f"frame {frame.fence}, slot {lane.handle.slot}"
    return FloatingPointError(f"{where}: the model's logits are not finite; is it damaged?")


def _token_score(logprob: np.float32, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> TokenScore:
    return TokenScore(float(logprob), tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True)))
