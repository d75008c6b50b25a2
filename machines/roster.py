"""Who is known, who holds what, and every move of a request.

Owns the known requests, their slots, generations, pages and state rows, from arrival to release (docs/scheduling.md,
"Slots and pages"). Does not own frames, prices or the order of waiting. Surprising rule: a slot's generation rises
with each owner, and also where one owner's saved state is bound anew.
"""

from __future__ import annotations

from .beliefs import Population
from .events import Effect, RequestMoved, Retired, WindowMoved
from .execution import Request
from .ids import Fence, RequestHandle, RequestId
from .lifecycle import (
    FENCED,
    WAITING,
    Admitted,
    Blocked,
    Cancel,
    End,
    Parked,
    Preempt,
    Rebound,
    Release,
    RequestEvent,
    RequestState,
    Stood,
    Terminate,
)
from .pages import PagePool
from .request import EndReason
from .state_rows import StateRows
from .waiting import WaitingQueue
from .windows import WindowState


class Roster:
    """`retires`: an ended request goes through a snapshot before its resources are free. `population` says what
    newcomers' proposals may come to."""

    def __init__(
        self,
        slots: int,
        pages: PagePool,
        state_rows: StateRows,
        waiting: WaitingQueue,
        *,
        retires: bool,
        population: Population,
    ) -> None:
        self.pages = pages
        self.state_rows = state_rows
        self.waiting = waiting
        self.retires = retires
        self.population = population
        self.requests: dict[RequestId, Request] = {}
        self.slots: list[Request | None] = [None] * slots
        self.completed = Fence(0)
        """The last frame that completed; frames complete in order."""
        self._generations = [0] * slots

    @property
    def residents(self) -> list[Request]:
        """Requests that hold a slot, in slot order."""
        return [request for request in self.slots if request is not None]

    @property
    def free_slots(self) -> int:
        """Request slots that nobody holds."""
        return self.slots.count(None)

    def owner(self, slot: int, generation: int) -> Request | None:
        """The request whose present execution is so named; None if it has gone."""
        request = self.slots[slot]
        return request if request is not None and request.handle == (slot, generation) else None

    # Moves

    def move(self, request: Request, event: RequestEvent, effects: list[Effect]) -> None:
        """Move a request and report what changed."""
        step = request.apply(event)
        if step.before is not step.after:
            cause = type(event).__name__
            effects.append(RequestMoved(request.id, request.handle, step.before.value, step.after.value, cause))
        for window in step.windows:
            effects.append(WindowMoved(request.id, window.before.value, window.after.value, window.cause))

    def admit(self, effects: list[Effect]) -> list[Request]:
        """Give free slots to those that wait, in their order, while pages and state rows last; who got one."""
        newcomers: list[Request] = []
        while self.free_slots and (request := self._next()) is not None and self._place(request, effects):
            newcomers.append(request)
        return newcomers

    def _next(self) -> Request | None:
        """Who gets the next slot. One that waits for a state row lets preempted ones go before it, which hold them."""
        head = self.waiting.head()
        if head is None or not self._lacks_row(head):
            return head
        return next((known for known in self.requests.values() if known.state is RequestState.PREEMPTED), None)

    def _lacks_row(self, request: Request) -> bool:
        needs = request.state is RequestState.QUEUED and request.spec.needs_state_row
        return needs and not self.state_rows.free

    def _place(self, request: Request, effects: list[Effect]) -> bool:
        spec = request.spec
        first = request.state is RequestState.QUEUED
        pages = self.pages.allocate(self.pages.needed(spec.prompt_tokens + spec.max_tokens))
        if pages is None:
            return False
        self.waiting.remove(request)
        slot = self.slots.index(None)
        self.slots[slot] = request
        row = self.state_rows.allocate(request.id) if first and spec.needs_state_row else None
        beliefs = None
        if first and self.population and not spec.needs_feedback:  # what only the host knows cannot be proposed
            beliefs = self.population.fresh()
        self.move(request, Admitted(self._fresh(slot), pages, row, beliefs), effects)
        if first and request.stages:
            self.move(request, Blocked(), effects)
        return True

    def rebind(self, request: Request, effects: list[Effect]) -> None:
        """Its saved state is to be bound to a fresh generation of its slot."""
        assert request.handle is not None
        self.move(request, Rebound(self._fresh(request.handle.slot)), effects)

    def _fresh(self, slot: int) -> RequestHandle:
        self._generations[slot] += 1
        return RequestHandle(slot, self._generations[slot])

    def end(self, request: Request, reason: EndReason, now_ns: int, effects: list[Effect]) -> None:
        """Its output is complete. It retires, unless no row of the device has its state to be saved."""
        if self.retires and request.bound:
            self.move(request, Terminate(reason, now_ns), effects)
            return
        if request.state in WAITING:
            self.waiting.remove(request)
        self.move(request, End(reason), effects)
        if self.retires:
            effects.append(Retired(request.id))
        self.release_if_unfenced(request, effects)

    def cancel(self, request: Request, effects: list[Effect]) -> None:
        """Nobody wants it any longer. Harmless for a request that has ended."""
        if request.state in FENCED:
            return
        if request.state in WAITING:
            self.waiting.remove(request)
            self._return_row(request)
            self.move(request, Cancel(), effects)
            self._forget(request)
            return
        self.move(request, Cancel(), effects)
        self.release_if_unfenced(request, effects)

    def preempt(self, request: Request, now_ns: int, effects: list[Effect]) -> None:
        """Take its slot away through a snapshot, if it is ready for that and has or finds a state row."""
        if request.state not in (RequestState.PREFILLING, RequestState.DECODING):
            return
        row = request.state_row if request.state_row is not None else self.state_rows.allocate(request.id)
        if row is not None:
            self.move(request, Preempt(row, now_ns), effects)

    def park(self, request: Request, effects: list[Effect]) -> None:
        """Its state is saved: it waits again, before its client's other requests."""
        self.vacate(request)
        self.move(request, Parked(), effects)
        self.waiting.put_back(request)

    # Resources

    def complete(self, fence: Fence, effects: list[Effect]) -> None:
        """All frames up to `fence` have completed: what they alone held is free."""
        self.completed = fence
        self.pages.complete(fence)
        self.state_rows.complete(fence)
        for request in self.residents:
            if request.state is RequestState.PREPARING and request.windows.state is WindowState.DRAINING:
                self.move(request, Stood(), effects)
            self.release_if_unfenced(request, effects)

    def release_if_unfenced(self, request: Request, effects: list[Effect]) -> None:
        """Release a request that is over, unless a frame in flight serves it."""
        if request.state not in FENCED or request.last_fence > self.completed:
            return
        self.vacate(request)
        self._return_row(request)
        self.move(request, Release(), effects)
        self._forget(request)

    def vacate(self, request: Request) -> None:
        """Free its slot and pages, if it holds any."""
        if request.handle is not None and self.owner(*request.handle) is request:
            self.pages.release(request.pages, request.last_fence)
            self.slots[request.handle.slot] = None

    def _return_row(self, request: Request) -> None:
        if request.state_row is not None:
            self.state_rows.release(request.state_row, request.id, request.last_fence)

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        self.waiting.leave(request.spec.client)

    def check(self) -> None:
        """Raise AssertionError if an invariant between requests and resources is broken. For tests."""
        for slot, request in enumerate(self.slots):
            if request is not None:
                assert request.handle == (slot, self._generations[slot])
                assert request.pages and self.requests.get(request.id) is request
        residents = self.residents
        for request in self.requests.values():
            request.check()
            assert (request.state in WAITING) != (request in residents)
        self.pages.check([request.pages for request in residents])
        rows = [(request.state_row, request.id) for request in self.requests.values() if request.state_row is not None]
        assert len(dict(rows)) == len(rows), "a state row has two owners"
        self.state_rows.check(dict(rows))
