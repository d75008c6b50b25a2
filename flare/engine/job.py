"""What the host keeps of one request: its prompt, its output and its text.

Owns the token ids that scheduling does not look at, the history that penalties read, and the deltas that results
become. Does not own states or slots. Surprising rule: text that is held back for a possible stop string still counts
its tokens at once; only its characters wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flare.graphs.frames import Binding, History, LaneInput, LaneResult, StageInput, TokenScore
from flare.machines.events import Dispatch
from flare.machines.ids import RequestHandle, RequestId
from flare.machines.request import EndReason, RequestSpec
from flare.request import Delta, GenerationRequest, ScoredToken
from flare.tokens.assembler import TextAssembler

from .copies import Copies
from .stream import Stream

SILENT_MAX = 8
"""Deltas in a row that may have no text, held back for a stop string or of tokens that have none, before they count as
visible. Else a request that is served in vain, as long as it likes, would look like one that nobody serves, and outbid
all others (docs/scheduling.md, "Prices")."""


class Job:
    """One accepted request on the host."""

    __slots__ = (
        "_assembler",
        "_copies",
        "_copies_max",
        "_penalised",
        "_prompt",
        "_prompt_scores",
        "_seen",
        "_stop_tokens",
        "admitted_at_ns",
        "arrived_at_ns",
        "finish",
        "first_at_ns",
        "id",
        "last_at_ns",
        "offer",
        "produced",
        "request",
        "silent",
        "stream",
    )

    def __init__(
        self,
        request_id: RequestId,
        request: GenerationRequest,
        stream: Stream,
        assembler: TextAssembler,
        eos_ids: Collection[int],
        arrived_at_ns: int,
        copies_max: int = 0,
    ) -> None:
        self.id = request_id
        self.request = request
        self.stream = stream
        self.arrived_at_ns = arrived_at_ns
        self.admitted_at_ns = self.first_at_ns = self.last_at_ns = 0
        self.produced = self.silent = 0
        self.finish: Delta | None = None
        self._assembler = assembler
        self._prompt: NDArray[np.int32] = np.array(request.prompt, dtype=np.int32)
        self._stop_tokens = tuple({*request.stop_token_ids, *(() if request.ignore_eos else eos_ids)})
        self._penalised = request.sampling.penalised
        # How often each token that penalties look at was output.
        self._seen = dict.fromkeys(request.prompt if request.sampling.repetition_penalty != 1.0 else (), 0)
        self._prompt_scores: list[ScoredToken] = []
        self._copies_max = copies_max
        self._copies: Copies | None = None
        self.offer: list[int] = []
        """Proposals copied from its own tokens, for the tokens after the last one delivered."""

    @property
    def spec(self) -> RequestSpec:
        """What scheduling needs to know."""
        request = self.request
        return RequestSpec(
            client=request.client,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            system_end=request.endpoints.system_end,
            messages=request.endpoints.messages,
            scored=request.prompt_logprobs is not None,
            needs_feedback=bool(request.stop) or self._penalised or request.min_tokens > 0,
        )

    def lane(self, dispatch: Dispatch, *, copies: bool = False) -> LaneInput:
        """The lane's input for a frame; its binding with the first frame of a generation. `copies`: the frame's graph
        is supplied with copied proposals."""
        work, request = dispatch.work, self.request
        binding = None
        if dispatch.pages is not None:
            binding = Binding(
                pages=dispatch.pages,
                sampling=request.sampling,
                stop_tokens=self._stop_tokens,
                output_limit=request.max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
            )
        handle, stage = RequestHandle(work.slot, work.generation), dispatch.stage
        if stage is not None:
            restored = self._prompt[: stage.restored_tokens] if stage.restored_tokens else None
            state = StageInput(stage.state_row, stage.operation, restored, stage.retires)
            return LaneInput(handle, work.start, emits=False, binding=binding, stage=state)
        end = work.start + work.tokens
        prefills = work.start < len(self._prompt) and self.produced == 0
        return LaneInput(
            handle=handle,
            start=work.start,
            emits=work.emits,
            tokens=self._prompt[work.start : end] if prefills else None,
            target=int(self._prompt[end]) if prefills and end < len(self._prompt) else None,
            binding=binding,
            history=self._history() if work.emits else None,
            width=1 if prefills else work.tokens,
            proposals=np.array(self.offer[: work.tokens - 1], np.int32) if copies and work.tokens > 1 else None,
        )

    def _history(self) -> History | None:
        short_of = self.request.min_tokens - self.produced
        banned = self._stop_tokens if short_of > 0 else ()
        if not self._penalised:
            return History(_NO_TOKENS, _NO_TOKENS, banned, short_of) if banned else None
        seen = self._seen
        ids, counts = np.fromiter(seen, np.int32, len(seen)), np.fromiter(seen.values(), np.int32, len(seen))
        return History(ids, counts, banned, max(1, short_of))

    def take(self, result: LaneResult, ended: EndReason | None) -> tuple[Delta | None, bool]:
        """The delta that a validated result becomes (None: nothing to say yet), and whether a stop string ended it."""
        if result.prompt_scores is not None:
            self._take_prompt_scores(result.prompt_scores)
        if not result.tokens and ended is None:
            return None, False
        self.produced += len(result.tokens)
        self._look_up(result, ended)
        if self._penalised:
            for token in result.tokens:
                self._seen[token] = self._seen.get(token, 0) + 1
        visible = len(result.tokens) - (ended is EndReason.STOP)  # the token that stops has no text, whatever it is
        piece = self._assembler.push(result.tokens[:visible], final=ended is not None)
        stopped = piece.stopped_by is not None
        finish = EndReason.STOP if stopped else ended
        delta = Delta(
            text=piece.text,
            tokens=self._scored(result),
            offsets=piece.offsets + (self._assembler.characters,) * (len(result.tokens) - visible),
            prompt_scores=self._release_prompt_scores(),
            completion_tokens=self.produced,
            finish_reason=finish,
            stop_reason=piece.stopped_by if stopped else self._stop_token(result, ended),
        )
        return delta, stopped

    def _look_up(self, result: LaneResult, ended: EndReason | None) -> None:
        """Find out what can be copied next."""
        if not self._copies_max or ended is not None:
            return
        if self._copies is None:  # not before it has come to its output: an index of a long prompt takes its time
            self._copies = Copies(self.request.prompt)
        self._copies.extend(result.tokens)
        self.offer = self._copies.propose(self._copies_max)

    def hold_finish(self, delta: Delta) -> Delta:
        """`delta` without its finish, which is kept in `finish` until the request is retired."""
        if delta.finish_reason is None:
            return delta
        self.finish = Delta(
            completion_tokens=delta.completion_tokens, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        return replace(delta, finish_reason=None, stop_reason=None)

    def _stop_token(self, result: LaneResult, ended: EndReason | None) -> int | None:
        last = result.tokens[-1] if result.tokens else None
        return last if ended is EndReason.STOP and last in self.request.stop_token_ids else None

    def _scored(self, result: LaneResult) -> tuple[ScoredToken, ...]:
        if result.scores is None:
            return tuple([ScoredToken(token, None) for token in result.tokens])
        return tuple(
            ScoredToken(token, score.logprob, score.top)
            for token, score in zip(result.tokens, result.scores, strict=True)
        )

    def published(self, delta: Delta) -> bool:
        """Whether a delta counts as visible text: it has some, or as many deltas in a row as are let pass had none."""
        self.silent = 0 if delta.text else self.silent + 1
        return self.silent == 0 or self.silent > SILENT_MAX

    def _take_prompt_scores(self, scores: tuple[TokenScore, ...]) -> None:
        if not self._prompt_scores:
            self._prompt_scores.append(ScoredToken(self.request.prompt[0], None))
        first = len(self._prompt_scores)
        for token, score in zip(self.request.prompt[first : first + len(scores)], scores, strict=True):
            self._prompt_scores.append(ScoredToken(token, score.logprob, score.top))

    def _release_prompt_scores(self) -> tuple[ScoredToken, ...] | None:
        if self.request.prompt_logprobs is None or (self.request.max_tokens and self.produced > 1):
            return None
        scores, self._prompt_scores = tuple(self._prompt_scores), []
        return scores or (ScoredToken(self.request.prompt[0], None),)


_NO_TOKENS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
