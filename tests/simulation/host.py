"""What a host keeps of one simulated request: its prompt, its output, and what a lone run of it would draw.

Owns tokens. Does not own scheduling. Surprising rule: a request that needs feedback draws with a presence penalty, so
that the simulated device itself refuses a frame that was submitted before the host knew all that came before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flare.graphs.frames import Binding, Frame, History, LaneInput, LaneResult, Sampling, StageInput
from flare.graphs.sim.rows import SimRows
from flare.graphs.sim.tokens import TokenSource, mix
from flare.machines.events import Dispatch
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.machines.ids import Fence, PageId, RequestHandle, RequestId
from flare.machines.request import RequestSpec

STOP_TOKEN = 1_000
NEVER_DRAWN = 999
TOKENS = TokenSource(seed=7, eos_at=lambda prompt, tokens, index: mix(prompt + tokens * 31 + index) % 12 == 0)


def history_of(output: list[int]) -> History:
    """How often each token was output."""
    ids, counts = np.unique(np.array(output, np.int32), return_counts=True)
    return History(ids.astype(np.int32), counts.astype(np.int32))


NO_HISTORY = history_of([])


class Host:
    """One request. `over`: its client wants, or gets, no more output."""

    def __init__(self, request: RequestId, spec: RequestSpec) -> None:
        self.id, self.spec, self.over = request, spec, False
        self.prompt = np.arange(spec.prompt_tokens, dtype=np.int32) * 3 + request
        self.sampling = Sampling(seed=request, presence_penalty=0.5 if spec.needs_feedback else 0.0)
        self.output: list[int] = []
        self.scored_to = 0
        self.expected = self._drawn_alone()

    def _drawn_alone(self) -> list[int]:
        """Its output on a device that it has for itself: the whole prompt in one frame, then token by token."""
        rows = SimRows(1, 1, self.spec.prompt_tokens + self.spec.max_tokens, TOKENS)
        handle, drawn = RequestHandle(0, 1), list[int]()
        shape = GraphShape(GraphKind.PREFILL, 1, self.spec.prompt_tokens)
        binding = Binding((PageId(0),), self.sampling, (STOP_TOKEN,), self.spec.max_tokens)
        lane = LaneInput(handle, 0, True, tokens=self.prompt, binding=binding, history=NO_HISTORY)
        while self.spec.max_tokens and STOP_TOKEN not in drawn and len(drawn) < self.spec.max_tokens:
            drawn.extend(rows.run(Frame(Fence(1), shape, (lane,)))[0].tokens)
            shape = GraphShape(GraphKind.DECODE, 1)
            lane = LaneInput(handle, self.spec.prompt_tokens, True, history=history_of(drawn))
        return drawn

    def binding(self, pages: tuple[PageId, ...]) -> Binding:
        """What the first frame of a generation carries."""
        spec = self.spec
        return Binding(
            pages=pages,
            sampling=self.sampling,
            stop_tokens=(STOP_TOKEN,),
            output_limit=spec.max_tokens,
            prompt_logprobs=0 if spec.scored else None,
            initialize=spec.initialize,
            windows=spec.windows,
            spans=spec.spans,
        )

    def lane(self, dispatch: Dispatch, source: Source, *, prefills: bool) -> LaneInput:
        """Its part of a frame; a `source` of copies is given its proposals."""
        work, stage = dispatch.work, dispatch.stage
        handle = RequestHandle(work.slot, work.generation)
        binding = None if dispatch.pages is None else self.binding(dispatch.pages)
        if stage is not None:
            restored = self.prompt[: stage.restored_tokens] if stage.restored_tokens else None
            state = StageInput(stage.state_row, stage.operation, restored, stage.retires)
            return LaneInput(handle, work.start, False, binding=binding, stage=state)
        end = work.start + work.tokens
        return LaneInput(
            handle=handle,
            start=work.start,
            emits=work.emits,
            tokens=self.prompt[work.start : end] if prefills else None,
            target=int(self.prompt[end]) if prefills and end < len(self.prompt) else None,
            binding=binding,
            history=history_of(self.output) if self.spec.needs_feedback and work.emits else None,
            width=1 if prefills else work.tokens,
            proposals=None if prefills or source is Source.DRAFT else self._copied(work.tokens - 1),
        )

    def _copied(self, count: int) -> NDArray[np.int32] | None:
        """So many proposals for what comes next: some right, the rest wrong. None for no proposals."""
        if not count:
            return None
        drawn = len(self.output)
        right = self.expected[drawn : drawn + min(count, (self.id + drawn) % 4)]
        return np.array((right + [NEVER_DRAWN] * count)[:count], np.int32)

    def take(self, result: LaneResult, *, ended: bool) -> None:
        """Take a delivered result. Raises AssertionError if a token is lost, doubled or another's."""
        before = len(self.output)
        self.output.extend(result.tokens)
        assert list(result.tokens) == self.expected[before : before + len(result.tokens)]
        if result.prompt_scores is not None:
            self.scored_to += len(result.prompt_scores)
        if ended:
            assert self.output == self.expected, "ended before its last token, or after it"
            assert self.scored_to == (self.spec.prompt_tokens - 1 if self.spec.scored else 0)
