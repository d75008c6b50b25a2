"""Decoding on the simulated device: plain steps, and rounds that verify several positions.

Owns what is drawn and where a row ends. Does not own how many of the program's own proposals are accepted
(`acceptance`). Surprising rule: an accepted proposal is the very token that plain decoding would draw there, so that a
wider round gives the same output sooner, never another one; copied proposals are accepted as far as they are that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flare.machines.request import EndReason

from ..frames import History, LaneInput, LaneResult, TokenScore
from .acceptance import Acceptance
from .state import FrameRefused, Progress, Row
from .tokens import TokenSource

_NONE: frozenset[int] = frozenset()


class Rounds:
    """Draws from `tokens` for rows whose prompt is complete."""

    __slots__ = ("_acceptance", "_tokens")

    def __init__(self, tokens: TokenSource, acceptance: Acceptance) -> None:
        self._tokens = tokens
        self._acceptance = acceptance

    def step(self, lane: LaneInput, row: Row, targets: int) -> tuple[Progress, LaneResult]:
        """A decode lane of which so many target positions are verified, `lane.width` at most: from 1 to `targets`
        tokens, or none for a row that has ended. Raises `FrameRefused`."""
        before = row.progress
        if lane.tokens is not None:
            raise FrameRefused(f"decode of {lane.handle} with prompt tokens")
        if not before.prompt_done:
            raise FrameRefused(f"decode of {lane.handle} before its prompt is complete")
        if before.ended is not None:
            return before, LaneResult(lane.handle, before.committed)
        if before.outputs == 0:
            raise FrameRefused(f"decode of {lane.handle}, which has no pending token")
        width, left = lane.width, row.binding.output_limit - before.outputs
        if width > left:
            raise FrameRefused(f"{lane.handle} may produce {left} more tokens; a round of {width} might pass that")
        # The pending token and the proposals behind it are written.
        row.check_room(before.committed + width - 1)
        return self.commit(row, before, lane.history, targets, lane.proposals)

    def commit(
        self,
        row: Row,
        before: Progress,
        history: History | None,
        targets: int = 0,
        copied: NDArray[np.int32] | None = None,
        prompt_scores: tuple[TokenScore, ...] | None = None,
    ) -> tuple[Progress, LaneResult]:
        """Draw one token and those that the accepted proposals of a round of `targets` positions add: of `copied` ones,
        else of the program's own. The end of a prompt verifies nothing. Raises `FrameRefused`."""
        binding, rules, outputs = row.binding, row.rules, before.outputs
        limit, stops = binding.output_limit, binding.stop_tokens
        if outputs >= limit:
            raise FrameRefused(f"{row.handle} may produce {limit} tokens")
        if rules.uses_counts and (history is None or int(history.output_counts.sum()) != outputs):
            raise FrameRefused(f"{row.handle} has penalties and {outputs} outputs; its history does not say so")
        banned = frozenset(history.banned) if history is not None else _NONE
        banned_to = outputs + (history.banned_for if history is not None else 0)
        last, offered = outputs + 1, targets - 1
        if offered > 0 and copied is None:
            last += self._acceptance(acceptance_key(before, row), outputs - 1, offered)
        drawn: list[int] = []
        ended = None
        while outputs < last and ended is None:
            ban = banned if outputs < banned_to else _NONE
            token = self._tokens.draw(rules, before.prompt_hash, before.consumed, outputs, ban)
            if token is None:
                raise FrameRefused(f"every token is forbidden to {row.handle}")
            if copied is not None and len(drawn) < offered and token == copied[len(drawn)]:
                last += 1
            drawn.append(token)
            outputs += 1
            if token in stops:
                ended = EndReason.STOP
            elif outputs == limit:
                ended = EndReason.LENGTH
        progress = Progress(before.consumed, before.prompt_hash, True, outputs, ended)
        scores = None if binding.logprobs is None else self._scores(drawn, before, binding.logprobs)
        committed = before.consumed + outputs
        return progress, LaneResult(row.handle, committed, tuple(drawn), ended, scores, prompt_scores, targets)

    def _scores(self, drawn: list[int], before: Progress, alternatives: int) -> tuple[TokenScore, ...]:
        first = before.committed
        return tuple(self._tokens.score(token, first + index, alternatives) for index, token in enumerate(drawn))


def acceptance_key(progress: Progress, row: Row) -> int:
    """What `Acceptance` and `Confidence` know a request by: its prompt, and how it draws."""
    return progress.prompt_hash ^ row.rules.key
