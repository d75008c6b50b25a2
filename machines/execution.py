"""A logical request and its executions: from arrival to the release of all that it held.

Owns a request's state, its counters of committed work, the stages before its next inference, and its times. Does not
own the transition table (`lifecycle`), nor its slot, pages, state row or text: the scheduler gives and takes those.
Surprising rule: an ended, cancelled or failed request keeps its slot and pages until the last frame that serves it has
completed; only then is it retired.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from .beliefs import Beliefs
from .graph import GraphKind
from .ids import Fence, PageId, RequestHandle, RequestId, StateRow
from .lifecycle import (
    RUNNABLE,
    TERMINAL,
    TRANSITIONS,
    WAITING,
    Admitted,
    Blocked,
    Cancel,
    ChunkCommitted,
    Dispatched,
    End,
    Fail,
    OutputReady,
    Parked,
    Preempt,
    PromptCommitted,
    PromptReady,
    Rebound,
    Release,
    RequestEvent,
    RequestState,
    RequestStep,
    Retire,
    StageCommitted,
    Stood,
    Terminate,
    TokensCommitted,
)
from .prices import ServicePrices
from .request import EndReason, RequestSpec
from .table import next_state
from .windows import Drained, Finished, Reached, WindowEvent, Windows, WindowState, WindowStep


@dataclass(slots=True, eq=False)
class Request:
    """The machine. Counters are of validated completions, never of queued work.

    `stages` are the operations before it can go on, in order. `bound`: a frame has carried the present generation's
    binding. `beliefs`: None where nothing can be proposed; `offered` proposals can be copied for it now.
    `visible_at_ns` is the last visible output, or the start of decoding before any; `terminal_at_ns` is when its output
    was found complete, or its preemption began.
    """

    id: RequestId
    spec: RequestSpec
    arrived_at_ns: int = 0
    state: RequestState = RequestState.QUEUED
    handle: RequestHandle | None = None
    pages: tuple[PageId, ...] = ()
    state_row: StateRow | None = None
    bound: bool = False
    consumed: int = 0
    produced: int = 0
    stages: tuple[GraphKind, ...] = ()
    windows: Windows = field(default_factory=lambda: Windows(()))
    visible_at_ns: int = 0
    terminal_at_ns: int = 0
    last_fence: Fence = field(default_factory=lambda: Fence(0))
    end_reason: EndReason | None = None
    prices: ServicePrices = field(default_factory=ServicePrices)
    beliefs: Beliefs | None = None
    offered: int = 0
    _entry: tuple[GraphKind, ...] = ()
    """What its execution begins with: initialization and restored prefix, or a resume."""
    _checkpoint_due: bool = False

    def apply(self, event: RequestEvent) -> RequestStep:
        """Move by one event. Raises `IllegalTransition`, or ValueError for counters that pass their limits and stages
        that are not due; then nothing has changed."""
        before = self.state
        after = next_state("request", TRANSITIONS, before, event)
        moved: tuple[WindowStep, ...] = ()
        match event:
            case Admitted():
                moved = self._admit(event, resumes=before is RequestState.PREEMPTED)
            case Dispatched(fence):
                self.last_fence, self.bound = fence, True
            case Blocked():
                if not self.stages:
                    raise ValueError("no stage is due")
            case StageCommitted(kind):
                moved = self._finish_stage(kind)
            case Stood():
                moved = self._windows(Drained())
            case Rebound(handle):
                self.handle, self.bound = handle, False
            case ChunkCommitted(tokens):
                moved = self._consume(tokens)
            case PromptCommitted(tokens, at_ns):
                moved = self._finish_prompt(tokens)
                self.visible_at_ns = at_ns
            case TokensCommitted(tokens):
                self._produce(tokens)
            case Preempt(state_row, at_ns):
                self.state_row, self.terminal_at_ns = state_row, at_ns
            case Terminate(reason, at_ns):
                self.end_reason = reason
                self.terminal_at_ns = self.terminal_at_ns if before is RequestState.PREEMPTING else at_ns
            case End(reason):
                self.end_reason = reason
            case Parked():
                self.handle, self.pages, self.bound = None, (), False
            case Release():
                self.pages, self.state_row = (), None
            case PromptReady() | OutputReady():
                self._check_ready(prompt_left=isinstance(event, PromptReady))
            case Cancel() if before in WAITING:
                self.state_row = None
            case Cancel() | Fail() | Retire():
                pass
        self.state = after
        return RequestStep(before, after, moved)

    @property
    def committed(self) -> int:
        """Context tokens of its validated frames: prompt tokens consumed and output tokens drawn."""
        return self.consumed + self.produced

    @property
    def runnable(self) -> bool:
        """Whether it is to be served and takes part in service accounting."""
        return self.state in RUNNABLE

    @property
    def terminal(self) -> bool:
        """Whether only the snapshot that retires it is left."""
        return self.state in TERMINAL

    @property
    def advances(self) -> bool:
        """Whether frames in flight still bring it tokens, and are charged to it."""
        return self.state in RUNNABLE or self.state is RequestState.PREEMPTING

    @property
    def stoppable(self) -> bool:
        """Whether it has drawn output, and may draw more."""
        return self.produced > 0 and (self.advances or self.state is RequestState.PREEMPTED)

    @property
    def prefills(self) -> bool:
        """Whether prompt tokens are left."""
        return self.consumed < self.spec.prompt_tokens

    @property
    def restores_prefix(self) -> bool:
        """Whether the restore that is due brings back a cached prefix, and not the state of an image window."""
        return self._entry[:1] == (GraphKind.RESTORE,)

    @property
    def position(self) -> int:
        """Where its prompt goes on: at the end of a prefix that is yet to be restored, else where it has come to."""
        return self.spec.restored_tokens if GraphKind.RESTORE in self._entry else self.consumed

    def boundary(self) -> int:
        """The prompt position that the next chunk may not cross (docs/scheduling.md, "Graphs")."""
        stop, system_end = self._stop(), self.spec.system_end
        return min(stop, system_end) if self.position < system_end else stop

    def _stop(self) -> int:
        """The next position where something is due."""
        spec, window = self.spec, self.windows.next_start()
        stop = spec.prompt_tokens if window is None else window
        later = bisect_right(spec.checkpoints, self.position)
        return min(stop, spec.checkpoints[later]) if later < len(spec.checkpoints) else stop

    def next_endpoint(self) -> int:
        """The first message or prompt endpoint beyond its position."""
        messages = self.spec.messages
        later = bisect_right(messages, self.position)
        return messages[later] if later < len(messages) else self.spec.prompt_tokens

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        spec, state = self.spec, self.state
        self.windows.check()
        assert 0 <= self.consumed <= spec.prompt_tokens
        assert 0 <= self.produced <= spec.max_tokens
        assert self.produced == 0 or not self.prefills
        if state is RequestState.QUEUED:
            assert self.handle is None and not self.pages and self.committed == 0
        if state is RequestState.PREEMPTED:
            assert self.handle is None and not self.pages and self.state_row is not None and self.end_reason is None
        if self.runnable or self.terminal:
            assert self.handle is not None and self.pages
        if state is RequestState.PREFILLING:
            assert self.prefills
        if state is RequestState.DECODING:
            assert self.produced >= min(1, spec.max_tokens) and not self.prefills and self.end_reason is None
        if state in (RequestState.ENDED, RequestState.RETIRING):
            assert self.end_reason is not None
        if state is RequestState.PREEMPTING:
            assert self.state_row is not None and self.end_reason is None
        if state is RequestState.RETIRED:
            assert not self.pages and self.state_row is None

    def _admit(self, event: Admitted, *, resumes: bool) -> tuple[WindowStep, ...]:
        self.handle, self.pages, self.bound = event.handle, event.pages, False
        if resumes:
            self._entry = (GraphKind.RESUME,)
            return self._due()
        self.state_row, self.beliefs = event.state_row, event.beliefs
        spec = self.spec
        self.windows = Windows(spec.windows_left)
        initialize = (GraphKind.INITIALIZE,) if spec.initialize else ()
        self._entry = initialize + ((GraphKind.RESTORE,) if spec.restored_tokens else ())
        return self._arrive(spec.restored_tokens)

    def _finish_stage(self, kind: GraphKind) -> tuple[WindowStep, ...]:
        if self.stages[:1] != (kind,):
            raise ValueError(f"{kind} is not the stage that is due")
        if self._entry:
            self._entry = self._entry[1:]
            if kind is GraphKind.RESTORE:
                self.consumed = self.spec.restored_tokens
            if kind is GraphKind.RESUME and not self.spec.needs_state_row:
                self.state_row = None
            return self._due()
        if self._checkpoint_due:
            self._checkpoint_due = False
            return self._due()
        return self._windows(self.windows.committed(kind))

    def _arrive(self, position: int) -> tuple[WindowStep, ...]:
        """What is due at a prompt position. A window's snapshot serves a checkpoint at the same place too."""
        reached = self.windows.next_start() == position
        self._checkpoint_due = position in self.spec.checkpoints_left
        if not reached:
            finished = position == self.spec.prompt_tokens and self.windows.state is WindowState.ACTIVE
            return self._windows(Finished()) if finished else self._due()
        moved = self._windows(Reached())
        if self.windows.state is WindowState.DRAINING:
            self._checkpoint_due = False
            self._due()
        return moved

    def _windows(self, event: WindowEvent) -> tuple[WindowStep, ...]:
        step = self.windows.apply(event)
        self._due()
        return (step,)

    def _due(self) -> tuple[WindowStep, ...]:
        checkpoint = (GraphKind.SNAPSHOT,) if self._checkpoint_due else ()
        self.stages = self._entry + checkpoint + self.windows.stages()
        return ()

    def _consume(self, tokens: int) -> tuple[WindowStep, ...]:
        left = self.spec.prompt_tokens - self.consumed
        if not 0 < tokens < left:
            raise ValueError(f"a chunk of {tokens} tokens leaves none of the {left} that are left")
        self._check_free(tokens)
        self.consumed += tokens
        return self._arrive(self.consumed)

    def _finish_prompt(self, tokens: int) -> tuple[WindowStep, ...]:
        left = self.spec.prompt_tokens - self.consumed
        if tokens != left or not left:
            raise ValueError(f"{tokens} tokens are not the {left} that are left of the prompt")
        self._check_free(tokens)
        self.consumed, self.produced = self.spec.prompt_tokens, min(1, self.spec.max_tokens)
        return self._arrive(self.consumed)

    def _check_free(self, tokens: int) -> None:
        if self.stages or tokens > self._stop() - self.consumed:
            raise ValueError(f"{tokens} tokens pass a stage that is due")

    def _produce(self, tokens: int) -> None:
        if self.stages or self.prefills:
            raise ValueError("no output tokens can come before the prompt and its stages")
        if tokens < 0 or self.produced + tokens > self.spec.max_tokens:
            raise ValueError(f"{tokens} output tokens pass the limit of {self.spec.max_tokens}")
        self.produced += tokens

    def _check_ready(self, *, prompt_left: bool) -> None:
        if self.stages or self.prefills != prompt_left:
            raise ValueError("it is not ready to go on so")
