"""The scheduler: routes events to the machines and keeps the rules that hold between them.

Owns the two frame slots and the order of things at arrival, cancellation, commit and completion.
Does not decide (the selector does), nor publish, nor read a clock. Surprising rule: a completion is validated lane by
lane before anything changes; one malformed lane fails its whole frame.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from flare.config.schema import REQUEST_SLOTS_MAX

from .accounting import Accounting
from .admission import check_admissible
from .beliefs import Population
from .commitment import CommitRefused, check_lanes, stage_work
from .completion import advance, fail
from .durations import DurationTable
from .events import (
    Arrive,
    CancelRequest,
    CompleteFrame,
    CopyOffered,
    Dispatch,
    Effect,
    Event,
    FrameCounted,
    HostStop,
    PreemptRequest,
    Published,
    SlotMoved,
    SubmitFrame,
)
from .execution import Request
from .graph import QUEUEABLE_KINDS, STAGE_KINDS, GraphKind, GraphShape, Source
from .host_gap import HostGap
from .ids import Fence, RequestId
from .ledgers import Ledgers
from .lifecycle import Dispatched
from .pages import PagePool
from .request import EndReason
from .roster import Roster
from .selection.board import Board
from .selection.compiled import Compiled
from .selection.reference import UNMEASURED, normalizers
from .selection.view import Plan, PolicyRow, Reason, View
from .slot import Commit, Execute, FrameSlot, Free, Participant, Reject, SlotEvent, SlotState, Submit, Validate
from .snapshot import take_view
from .state_rows import StateRows
from .validation import Progress, validate
from .waiting import WaitingQueue

FRAME_SLOTS = 2


class Scheduler:
    """All scheduling state. `apply` takes events, `view` gives what `select` reads, `commit` takes its plan.

    `slots` is the number of request slots (1 to `REQUEST_SLOTS_MAX`), `catalog` the prepared graphs, `state_rows` the
    private rows that the device has for saved states. `adaptive_verification_alpha` is the exponent on survival in the
    scores of speculative rounds. `device_allocates`: ragged programs that draft share out their target rows themselves,
    but not with `keeps_prefixes`: then rounds offer all that their requests' limits allow, and none probes for more.
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
        state_rows: int = 0,
        adaptive_verification_alpha: float = 1.0,
        device_allocates: bool = False,
        keeps_prefixes: bool = False,
    ) -> None:
        if not 1 <= slots <= REQUEST_SLOTS_MAX:
            raise ValueError(f"slots must be from 1 to {REQUEST_SLOTS_MAX}")
        self.catalog = tuple(catalog)
        self.compiled = Compiled.of(self.catalog)
        self.policy = policy
        self.waiting = waiting
        self.durations = durations
        self.accounting = Accounting(adaptation_ms, policy.newcomer_share)
        self.device_allocates = device_allocates and not keeps_prefixes
        self.keeps_prefixes = keeps_prefixes
        population = Population(self.catalog, adaptive_verification_alpha)
        self.ledgers = Ledgers(probes=bool(population) and not keeps_prefixes)
        self.frames = tuple(FrameSlot(index) for index in range(FRAME_SLOTS))
        self.host_gap = HostGap()
        self._kinds = frozenset(shape.kind for shape in self.catalog)
        self._roster = Roster(
            slots,
            pages,
            StateRows(state_rows),
            waiting,
            retires=GraphKind.TERMINAL_SNAPSHOT in self._kinds,
            population=population,
        )
        self._order: list[FrameSlot] = []
        self._newcomers: list[Request] = []
        self._newcomers_ns = 0
        self._fence = Fence(0)

    # Queries

    @property
    def requests(self) -> dict[RequestId, Request]:
        """Every request that is known: waiting, resident, or not yet released."""
        return self._roster.requests

    @property
    def pages(self) -> PagePool:
        """The pages of the KV cache."""
        return self._roster.pages

    @property
    def state_rows(self) -> StateRows:
        """The private rows for saved states."""
        return self._roster.state_rows

    @property
    def residents(self) -> list[Request]:
        """Requests that hold a slot, in slot order."""
        return self._roster.residents

    @property
    def free_slots(self) -> int:
        """Request slots that nobody holds."""
        return self._roster.free_slots

    @property
    def retires(self) -> bool:
        """Whether an ended request is retired through a snapshot before its response completes."""
        return self._roster.retires

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
        """Whether any resident request can be served or retired at all."""
        slots = self._roster.slots
        return any(request is not None and (request.runnable or request.terminal) for request in slots)

    def load(self) -> tuple[int, int, float]:
        """Requests that hold a slot, requests that wait for one, and the share of pages in use (0 to 1)."""
        running = len(self._roster.slots) - self.free_slots
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
        return self._view(now_ns, self.residents)

    def board(self, now_ns: int) -> Board:
        """That snapshot, sorted out and priced: what a decision and its commit share."""
        return Board.of(self.view(now_ns), self.compiled)

    def _view(self, now_ns: int, requests: Sequence[Request]) -> View:
        return take_view(
            now_ns,
            policy=self.policy,
            graphs=self.durations.rows(now_ns),
            requests=[request for request in requests if request.runnable or request.terminal],
            frames=self._order,
            accounting=self.accounting,
            free_slots=self.free_slots,
            free_pages=self.pages.free,
            queued_requests=self.waiting.requests,
            queued_tokens=self.waiting.tokens,
            refresh_funded=self.ledgers.funded(Reason.TIMING_REFRESH),
            probe_funded=self.ledgers.funded(Reason.ACCEPTANCE_PROBE),
            device_allocates=self.device_allocates,
            keeps_prefixes=self.keeps_prefixes,
            host_gap_ms=self.host_gap.ms,
        )

    # Events

    def apply(self, event: Event, now_ns: int) -> list[Effect]:
        """Apply one event at its time; returns what is to be done, in order. Slots are given anew after each.

        Raises ValueError for the arrival of a request that can never be served, and for a completion out of order.
        """
        effects: list[Effect] = []
        match event:
            case Arrive(request_id, spec):
                check_admissible(spec, self.catalog, self.pages, self.state_rows)
                request = Request(request_id, spec, now_ns)
                self.requests[request_id] = request
                self.waiting.push(request)
            case CancelRequest(request_id):
                if (known := self.requests.get(request_id)) is not None:
                    self._roster.cancel(known, effects)
            case CompleteFrame():
                self._complete(event, now_ns, effects)
            case Published(request_id, fence):
                if (known := self.requests.get(request_id)) is not None:
                    known.visible_at_ns = now_ns
                    self.accounting.publish(known, fence)
            case HostStop(request_id):
                if (known := self.requests.get(request_id)) is not None and known.stoppable:
                    self._roster.end(known, EndReason.STOP, now_ns, effects)
            case CopyOffered(request_id, proposals):
                if (known := self.requests.get(request_id)) is not None:
                    known.offered = proposals
                return effects  # it frees nothing, and comes with every token
            case PreemptRequest(request_id):
                known = self.requests.get(request_id)
                if known is not None and self.retires and GraphKind.RESUME in self._kinds:
                    self._roster.preempt(known, now_ns, effects)
        self._admit(now_ns, effects)
        if not self._order and not self.has_runnable:
            self.ledgers.rest(effects)
        return effects

    def _admit(self, now_ns: int, effects: list[Effect]) -> None:
        admitted = self._roster.admit(effects)
        # One that resumes is no newcomer: its price is the one that it had.
        newcomers = [request for request in admitted if request.stages[:1] != (GraphKind.RESUME,)]
        if not newcomers:
            return
        if now_ns != self._newcomers_ns:
            self._newcomers, self._newcomers_ns = [], now_ns
        self._newcomers += newcomers
        runnable = sum(request.runnable for request in self.residents)
        view = self._view(now_ns, self._newcomers)
        self.accounting.start(self._newcomers, runnable, normalizers(Board.of(view, self.compiled)))

    # Commit

    def commit(self, plan: Plan, board: Board, now_ns: int) -> list[Effect]:
        """Commit and submit a plan that was chosen from `board`. Raises `CommitRefused` if ownership, epochs, stages,
        resources, feedback dependencies, freshness or credit no longer allow it; selection is not run again."""
        self._check_commit(plan, now_ns)
        self._newcomers = []
        frame = next(slot for slot in self.frames if slot.state is SlotState.FREE)
        self._fence = fence = Fence(self._fence + 1)
        effects: list[Effect] = []
        dispatches = self._dispatches(plan)
        stages = tuple([dispatch.stage for dispatch in dispatches if dispatch.stage is not None])
        closes_window = self.durations.row(plan.shape, now_ns).runs_alone
        commit = Commit(fence, plan, self._participants(plan, board), closes_window, stages)
        self._move_slot(frame, commit, effects)
        for dispatch in dispatches:
            self._roster.move(self.requests[dispatch.request], Dispatched(fence), effects)
        start_ns = max(now_ns, self._expected_end_ns())
        self._move_slot(frame, Submit(now_ns, start_ns + plan.duration_ns, isolated=not self._order), effects)
        self._order.append(frame)
        self.durations.attempt(plan.shape, now_ns)
        credit_ns = self.ledgers.credit_ns(plan.reason)
        self.ledgers.open(plan.reason, effects)
        effects.append(SubmitFrame(fence, plan, dispatches, commit.participants, credit_ns))
        return effects

    def _dispatches(self, plan: Plan) -> tuple[Dispatch, ...]:
        kind, dispatches = plan.shape.kind, []
        for work in plan.lanes:
            request = self._roster.slots[work.slot]
            assert request is not None
            stage = None
            if kind in STAGE_KINDS:
                # The device's row stands where it is until a prefix is restored.
                stage, work = stage_work(request, kind), msgspec.structs.replace(work, start=request.consumed)
            dispatches.append(Dispatch(request.id, work, None if request.bound else request.pages, stage))
        return tuple(dispatches)

    def _participants(self, plan: Plan, board: Board) -> tuple[Participant, ...]:
        works, measured = {work.slot: work for work in plan.lanes}, normalizers(board)
        participants = []
        for slot, request in enumerate(self._roster.slots):
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
        row = self.durations.row(plan.shape, now_ns)
        if plan.reason is Reason.TIMING_REFRESH and not (row.stale and self.ledgers.funded(plan.reason)):
            raise CommitRefused(f"a refresh of {plan.shape.name} is not due, or not paid for")
        if plan.reason is Reason.ACCEPTANCE_PROBE and not self.ledgers.funded(plan.reason):
            raise CommitRefused(f"a probe with {plan.shape.name} is not paid for")
        drafts_ragged = plan.shape.ragged and plan.shape.source is Source.DRAFT
        if plan.allocates and not (self.device_allocates and drafts_ragged):
            raise CommitRefused(f"{plan.shape.name} does not allocate its rows")
        alone = check_lanes(plan, self._roster, self._order) or row.runs_alone
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
        lanes = [self._roster.owner(work.slot, work.generation) for work in commit.plan.lanes]
        progress, error = validate(commit, lanes, event)
        if error is None:
            self.durations.observe(commit.plan.shape, event.device_ns, now_ns)
            self._move_slot(frame, Validate(), effects)
            self.accounting.charge(commit, frame.interval_ns, self._roster.slots, progress)
            for lane in progress:
                advance(lane, commit, self._roster, now_ns, effects)
        else:
            self._move_slot(frame, Reject(), effects)
            fail(lanes, error, self._roster, effects)
        self._account(frame, progress, error, effects)
        self._move_slot(frame, Free(), effects)
        self._reanchor(now_ns)
        self._roster.complete(commit.fence, effects)

    def _account(
        self, frame: FrameSlot, progress: Sequence[Progress], error: str | None, effects: list[Effect]
    ) -> None:
        """Count an executed frame, and let the ledgers earn from it or pay for it."""
        commit, submit, execute = frame.commit, frame.submit, frame.execute
        assert commit is not None and submit is not None and execute is not None
        plan, device_ns, wall_ns = commit.plan, execute.device_ns, execute.at_ns - submit.at_ns
        self.host_gap.observe(submit, execute)
        self.ledgers.account(plan.reason, frame, failed=error is not None, effects=effects)
        prompt = sum(lane.prompt_tokens for lane in progress)
        output = sum(lane.output_tokens for lane in progress)
        rounds = tuple([(lane.targets, lane.output_tokens) for lane in progress if lane.targets > 1])
        effects.append(
            FrameCounted(commit.fence, plan.shape, plan.reason, device_ns, wall_ns, prompt, output, error, rounds)
        )

    def _reanchor(self, now_ns: int) -> None:
        """The next frame began when this one ended: its expected finish follows from now."""
        start_ns = now_ns
        for frame in self._order:
            assert frame.commit is not None
            start_ns += frame.commit.plan.duration_ns
            frame.reanchor(start_ns)

    # Moves

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
        self._roster.check()
        self.ledgers.check()
        assert len(self._order) <= FRAME_SLOTS
        if len(self._order) == FRAME_SLOTS:
            assert all(f.commit is not None and f.commit.plan.shape.kind in QUEUEABLE_KINDS for f in self._order)
        self.accounting.check(self.residents)
