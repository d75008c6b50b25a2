"""The scheduler: routes events to the machines and keeps the rules that hold between them.

Owns the resident requests, their slots and generations, the two frame slots, and the order of things at arrival,
cancellation, commit and completion. Does not decide (the selector does), nor publish, nor read a clock. Surprising
rule: a completion is validated lane by lane before anything changes; one malformed lane fails its whole frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flare.config.schema import REQUEST_SLOTS_MAX

from .accounting import Accounting
from .commitment import CommitRefused, check_lanes
from .durations import DurationTable
from .events import (
    Arrive,
    CancelRequest,
    CompleteFrame,
    Deliver,
    Dispatch,
    Effect,
    Event,
    FrameCounted,
    HostStop,
    Published,
    RequestLost,
    RequestMoved,
    SlotMoved,
    SubmitFrame,
)
from .graph import QUEUEABLE_KINDS, GraphShape
from .ids import Fence, PageId, RequestHandle, RequestId
from .pages import PagePool
from .request import (
    FENCED,
    Admitted,
    Cancel,
    ChunkCommitted,
    Dispatched,
    End,
    EndReason,
    Fail,
    PromptCommitted,
    PromptScored,
    Release,
    Request,
    RequestEvent,
    RequestSpec,
    RequestState,
    TokensCommitted,
)
from .selection.reference import UNMEASURED, normalizers
from .selection.view import Plan, PolicyRow, View
from .slot import Commit, Execute, FrameSlot, Free, Participant, Reject, SlotEvent, SlotState, Submit, Validate
from .snapshot import take_view
from .validation import Progress, validate
from .waiting import WaitingQueue

FRAME_SLOTS = 2


class Scheduler:
    """All scheduling state. `apply` takes events, `view` gives what `select` reads, `commit` takes its plan.

    `slots` is the number of request slots (1 to `REQUEST_SLOTS_MAX`), `catalog` the prepared graphs.
    """

    def __init__(
        self,
        catalog: Sequence[GraphShape],
        policy: PolicyRow,
        *,
        slots: int,
        pages: PagePool,
        waiting: WaitingQueue,
        durations: DurationTable,
        adaptation_ms: float,
    ) -> None:
        if not 1 <= slots <= REQUEST_SLOTS_MAX:
            raise ValueError(f"slots must be from 1 to {REQUEST_SLOTS_MAX}")
        self.catalog = tuple(catalog)
        self.policy = policy
        self.pages = pages
        self.waiting = waiting
        self.durations = durations
        self.accounting = Accounting(adaptation_ms, policy.newcomer_share)
        self.requests: dict[RequestId, Request] = {}
        self.frames = tuple(FrameSlot(index) for index in range(FRAME_SLOTS))
        self._resident: list[Request | None] = [None] * slots
        self._generations = [0] * slots
        self._order: list[FrameSlot] = []
        self._fence = Fence(0)

    # Queries

    @property
    def residents(self) -> list[Request]:
        """Requests that hold a slot, in slot order."""
        return [request for request in self._resident if request is not None]

    @property
    def free_slots(self) -> int:
        """Request slots that nobody holds."""
        return self._resident.count(None)

    @property
    def in_flight(self) -> tuple[FrameSlot, ...]:
        """Submitted frames, oldest first."""
        return tuple(self._order)

    @property
    def accepts(self) -> bool:
        """Whether a frame slot could accept a plan now: one is free, and nothing in flight closes the window."""
        if len(self._order) == FRAME_SLOTS:
            return False
        return not any(frame.commit is not None and frame.commit.closes_window for frame in self._order)

    @property
    def has_runnable(self) -> bool:
        """Whether any resident request can be served at all."""
        return any(request is not None and request.runnable for request in self._resident)

    def load(self) -> tuple[int, int, float]:
        """Requests that hold a slot, requests that wait for one, and the share of pages in use (0 to 1)."""
        running = len(self._resident) - self.free_slots
        return running, self.waiting.requests, 1.0 - self.pages.free / self.pages.total

    @property
    def idle(self) -> bool:
        """No request is known and no frame is in flight."""
        return not self.requests and not self._order

    def refuses(self, asked: Sequence[tuple[int, int]]) -> bool:
        """Whether the queue has no room for requests of these (prompt tokens, output tokens at most), all or none.

        Those that find a slot and pages at once do not wait; while others wait, nobody does before them.
        """
        slots = 0 if self.waiting.requests else self.free_slots
        needed = itertools.accumulate(self.pages.needed(prompt + output) for prompt, output in asked[:slots])
        waiting = asked[sum(pages <= self.pages.free for pages in needed) :]
        return self.waiting.refuses(len(waiting), sum(prompt for prompt, _ in waiting))

    def view(self, now_ns: int) -> View:
        """The frozen snapshot that a decision reads."""
        return take_view(
            now_ns,
            policy=self.policy,
            graphs=self.durations.rows(now_ns),
            requests=[request for request in self.residents if request.runnable],
            frames=self._order,
            accounting=self.accounting,
            free_slots=self.free_slots,
            free_pages=self.pages.free,
            queued_requests=self.waiting.requests,
            queued_tokens=self.waiting.tokens,
        )

    # Events

    def apply(self, event: Event, now_ns: int) -> list[Effect]:
        """Apply one event at its time; returns what is to be done, in order. Slots are given anew after each."""
        effects: list[Effect] = []
        match event:
            case Arrive(request_id, spec):
                self._check_fits(spec)
                request = Request(request_id, spec)
                self.requests[request_id] = request
                self.waiting.push(request)
            case CancelRequest(request_id):
                self._cancel(request_id, effects)
            case CompleteFrame():
                self._complete(event, now_ns, effects)
            case Published(request_id, fence):
                known = self.requests.get(request_id)
                if known is not None:
                    known.visible_at_ns = now_ns
                    self.accounting.publish(known, fence)
            case HostStop(request_id):
                known = self.requests.get(request_id)
                if known is not None and known.runnable:
                    self._move(known, End(EndReason.STOP), effects)
                    self._release_if_unfenced(known, effects)
        self._admit(now_ns, effects)
        return effects

    def _check_fits(self, spec: RequestSpec) -> None:
        """A request that could never have its pages would wait for ever, and all others behind it."""
        tokens = spec.prompt_tokens + spec.max_tokens
        if self.pages.needed(tokens) > self.pages.total:
            capacity = self.pages.total * self.pages.page_tokens
            raise ValueError(f"prompt_tokens and max_tokens come to {tokens} tokens; all pages hold {capacity}")

    def _cancel(self, request_id: RequestId, effects: list[Effect]) -> None:
        request = self.requests.get(request_id)
        if request is None or request.state in FENCED:
            return
        if request.state is RequestState.QUEUED:
            self.waiting.remove(request)
            self._move(request, Cancel(), effects)
            self._forget(request)
            return
        self._move(request, Cancel(), effects)
        self._release_if_unfenced(request, effects)

    def _admit(self, now_ns: int, effects: list[Effect]) -> None:
        newcomers: list[Request] = []
        while self.waiting.requests and self.free_slots:
            request = self.waiting.head()
            assert request is not None
            spec = request.spec
            pages = self.pages.allocate(self.pages.needed(spec.prompt_tokens + spec.max_tokens))
            if pages is None:
                break
            self.waiting.remove(request)
            slot = self._resident.index(None)
            self._generations[slot] += 1
            self._resident[slot] = request
            self._move(request, Admitted(RequestHandle(slot, self._generations[slot]), pages), effects)
            newcomers.append(request)
        if newcomers:
            runnable = sum(request.runnable for request in self.residents)
            self.accounting.start(newcomers, runnable, normalizers(self.view(now_ns)))

    # Commit

    def commit(self, plan: Plan, view: View, now_ns: int) -> list[Effect]:
        """Commit and submit a plan that `select` chose from `view`. Raises `CommitRefused` if ownership, epochs,
        resources, feedback dependencies or freshness no longer allow it; selection is not run again."""
        self._check_commit(plan, now_ns)
        frame = next(slot for slot in self.frames if slot.state is SlotState.FREE)
        self._fence = fence = Fence(self._fence + 1)
        effects: list[Effect] = []
        closes_window = self.durations.row(plan.shape, now_ns).runs_alone
        commit = Commit(fence, plan, self._participants(plan, view), closes_window)
        self._move_slot(frame, commit, effects)
        lanes, dispatched = [], Dispatched(fence)
        for work in plan.lanes:
            request = self._resident[work.slot]
            assert request is not None
            lanes.append(Dispatch(request.id, work, None if request.last_fence else request.pages))
            self._move(request, dispatched, effects)
        start_ns = max(now_ns, self._expected_end_ns())
        self._move_slot(frame, Submit(now_ns, start_ns + plan.duration_ns, isolated=not self._order), effects)
        self._order.append(frame)
        self.durations.attempt(plan.shape, now_ns)
        effects.append(SubmitFrame(fence, plan, tuple(lanes), commit.participants))
        return effects

    def _participants(self, plan: Plan, view: View) -> tuple[Participant, ...]:
        works, measured = {work.slot: work for work in plan.lanes}, normalizers(view)
        participants = []
        for slot, request in enumerate(self._resident):
            if request is None or not request.runnable:
                continue
            assert request.handle is not None
            work = works.get(slot)
            tokens, delivers = (0.0, False) if work is None else (work.expected_tokens, work.delivers)
            normalizer = measured.get(request.handle, UNMEASURED)
            participants.append(Participant(request.handle, normalizer, tokens, delivers))
        return tuple(participants)

    def _check_commit(self, plan: Plan, now_ns: int) -> None:
        if not self.accepts:
            raise CommitRefused("no frame slot can accept a plan")
        if plan.shape not in self.catalog:
            raise CommitRefused(f"{plan.shape.name} is not prepared")
        alone = check_lanes(plan, self._resident, self._order) or self.durations.row(plan.shape, now_ns).runs_alone
        if alone and self._order:
            raise CommitRefused("the plan needs completion feedback, and a frame is in flight")

    def _expected_end_ns(self) -> int:
        return max((f.submit.expected_finish_ns for f in self._order if f.submit is not None), default=0)

    # Completion

    def _complete(self, event: CompleteFrame, now_ns: int, effects: list[Effect]) -> None:
        if not self._order or (oldest := self._order[0]).commit is None or oldest.commit.fence != event.fence:
            raise ValueError(f"completion of fence {event.fence}, which is not the oldest frame in flight")
        frame, commit = oldest, oldest.commit
        self._order.pop(0)
        self._move_slot(frame, Execute(now_ns, event.device_ns), effects)
        lanes = [self._resident[work.slot] for work in commit.plan.lanes]
        progress, error = validate(commit.plan, lanes, event)
        assert frame.submit is not None
        wall_ns = now_ns - frame.submit.at_ns
        prompt = output = 0
        if error is None:
            self.durations.observe(commit.plan.shape, event.device_ns, now_ns)
            self._move_slot(frame, Validate(), effects)
            self.accounting.charge(commit, frame.interval_ns, self._resident, progress)
            for lane in progress:
                self._advance(lane, commit.fence, now_ns, effects)
                prompt, output = prompt + lane.prompt_tokens, output + lane.output_tokens
        else:
            self._move_slot(frame, Reject(), effects)
            for request, work in zip(lanes, commit.plan.lanes, strict=True):
                if request is not None and request.handle == (work.slot, work.generation) and request.runnable:
                    self._move(request, Fail(), effects)
                    effects.append(RequestLost(request.id, error))
        effects.append(
            FrameCounted(
                commit.fence, commit.plan.shape, commit.plan.reason, event.device_ns, wall_ns, prompt, output, error
            )
        )
        self._move_slot(frame, Free(), effects)
        self.pages.complete(commit.fence)
        self._reanchor(now_ns)
        for request in [request for request in self.residents if request.state in FENCED]:
            self._release_if_unfenced(request, effects)

    def _advance(self, lane: Progress, fence: Fence, now_ns: int, effects: list[Effect]) -> None:
        request = lane.request
        self.waiting.serve(request.spec.client, lane.prompt_tokens, lane.output_tokens)
        if lane.prompt_tokens:
            if lane.scored:
                self._move(request, PromptScored(lane.prompt_tokens), effects)
            elif lane.output_tokens:
                self._move(request, PromptCommitted(lane.prompt_tokens, now_ns), effects)
            else:
                self._move(request, ChunkCommitted(lane.prompt_tokens), effects)
        else:
            self._move(request, TokensCommitted(lane.output_tokens), effects)
        if lane.ended is not None and not lane.scored:
            self._move(request, End(lane.ended), effects)
        if lane.output_tokens or lane.ended is not None or request.spec.scored:
            assert request.handle is not None
            effects.append(Deliver(request.id, request.handle, fence, lane.ended))

    def _reanchor(self, now_ns: int) -> None:
        """The next frame began when this one ended: its expected finish follows from now."""
        start_ns = now_ns
        for frame in self._order:
            assert frame.commit is not None
            start_ns += frame.commit.plan.duration_ns
            frame.reanchor(start_ns)

    # Moves

    def _release_if_unfenced(self, request: Request, effects: list[Effect]) -> None:
        if request.state not in FENCED:
            return
        oldest = min((f.commit.fence for f in self._order if f.commit is not None), default=None)
        if oldest is not None and request.last_fence >= oldest:
            return
        pages: tuple[PageId, ...] = request.pages
        self._move(request, Release(), effects)
        self.pages.release(pages, request.last_fence)
        assert request.handle is not None
        self._resident[request.handle.slot] = None
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        self.waiting.leave(request.spec.client)

    def _move(self, request: Request, event: RequestEvent, effects: list[Effect]) -> None:
        step = request.apply(event)
        if step.before is not step.after:
            effects.append(
                RequestMoved(request.id, request.handle, step.before.value, step.after.value, type(event).__name__)
            )

    def _move_slot(self, frame: FrameSlot, event: SlotEvent, effects: list[Effect]) -> None:
        fence = frame.commit.fence if frame.commit is not None else Fence(0)
        step = frame.apply(event)
        if frame.commit is not None:
            fence = frame.commit.fence
        effects.append(SlotMoved(frame.index, fence, step.before.value, step.after.value, type(event).__name__))

    def check(self) -> None:
        """Raise AssertionError if an invariant between the machines is broken. For tests."""
        for frame in self.frames:
            frame.check()
        for slot, request in enumerate(self._resident):
            if request is not None:
                request.check()
                assert request.handle == (slot, self._generations[slot])
                assert request.pages and self.requests.get(request.id) is request
        assert len(self._order) <= FRAME_SLOTS
        if len(self._order) == FRAME_SLOTS:
            assert all(f.commit is not None and f.commit.plan.shape.kind in QUEUEABLE_KINDS for f in self._order)
        self.pages.check([request.pages for request in self.residents])
        self.accounting.check(self.residents)
