"""Prompts on the simulated device: chunks in order, whole spans, and images encoded before they are read.

Owns what a prompt lane consumes and scores. Does not own drawing (`rounds`). Surprising rule: image windows stop a
chunk on two sides. It may not enter a window whose images are not encoded, nor the next window while the features of
this one are held.
"""

from __future__ import annotations

from flare.machines.graph import GraphKind

from ..frames import LaneInput, LaneResult, TokenScore
from .rounds import Rounds
from .state import FrameRefused, Progress, Row
from .tokens import HASH_MASK, TokenSource, hash_tokens


class Prompts:
    """Consumes prompts; the first output token is drawn by `rounds`."""

    __slots__ = ("_rounds", "_tokens")

    def __init__(self, tokens: TokenSource, rounds: Rounds) -> None:
        self._tokens = tokens
        self._rounds = rounds

    def step(self, kind: GraphKind, lane: LaneInput, row: Row) -> tuple[Progress, LaneResult]:
        """One chunk of a row's prompt, scored in a graph of kind `SCORED_PREFILL`. Raises `FrameRefused`."""
        before, tokens, scored = row.progress, lane.tokens, kind is GraphKind.SCORED_PREFILL
        if tokens is None or len(tokens) == 0:
            raise FrameRefused(f"{kind} of {lane.handle} without tokens")
        row.check_initialized()
        if before.prompt_done:
            raise FrameRefused(f"{kind} of {lane.handle}, whose prompt is complete")
        if lane.start != before.consumed:
            raise FrameRefused(f"{kind} of {lane.handle} from {lane.start}, but the row stands at {before.consumed}")
        if lane.emits and lane.target is not None:
            raise FrameRefused(f"{kind} of {lane.handle} emits, yet names a target beyond the prompt's end")
        end = lane.start + len(tokens)
        row.check_room(end)
        check_span(row, end)
        _check_window(row, end)
        prompt_hash = (before.prompt_hash + hash_tokens(tokens, lane.start)) & HASH_MASK
        prompt_done = lane.emits or (scored and lane.target is None)
        progress = Progress(end, prompt_hash, prompt_done)
        prompt_scores = self._scores(lane, row) if scored else None
        if lane.emits:
            return self._rounds.commit(row, progress, lane.history, prompt_scores=prompt_scores)
        return progress, LaneResult(lane.handle, end, prompt_scores=prompt_scores)

    def _scores(self, lane: LaneInput, row: Row) -> tuple[TokenScore, ...]:
        alternatives = row.binding.prompt_logprobs
        if alternatives is None or lane.tokens is None:
            raise FrameRefused(f"scored prefill of {lane.handle}, whose binding asks for no prompt log-probabilities")
        scored = [int(token) for token in lane.tokens[1:]]
        if lane.target is not None:
            scored.append(lane.target)
        return tuple(
            self._tokens.score(token, lane.start + 1 + index, alternatives) for index, token in enumerate(scored)
        )


def check_span(row: Row, end: int) -> None:
    """Raises `FrameRefused` if `end` is inside one of the spans that a chunk consumes whole or not at all."""
    for first, last in row.binding.spans:
        if first < end < last:
            raise FrameRefused(f"{row.handle} would stop at {end}, inside the span from {first} to {last}")


def _check_window(row: Row, end: int) -> None:
    windows, setup = row.binding.windows, row.setup
    if setup.window < len(windows):
        window = windows[setup.window]
        if setup.operations < window.operations and end > window.start:
            done = f"{setup.operations} of {window.operations} image operations"
            raise FrameRefused(f"{row.handle} would pass {window.start} after {done}")
        if setup.window + 1 < len(windows) and end > windows[setup.window + 1].start:
            following = windows[setup.window + 1].start
            raise FrameRefused(f"{row.handle} would pass {following}, where another image window begins")
