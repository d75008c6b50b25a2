"""The driver: works off one instant, over any clock.

Owns the order within an instant (all completions, then decisions while a frame slot could accept one) and the way from
a plan to a frame. Does not own a clock, a device or what hosts keep of requests. Surprising rule: it is synchronous;
the server calls it on its event loop, a simulation in virtual time, so that both take the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flare.graphs.device import DeviceLost
from flare.graphs.frames import Completion, Frame, LaneInput, LaneResult
from flare.machines.events import CompleteFrame, CompletionRecord, Dispatch, Effect, SubmitFrame
from flare.machines.graph import GraphShape
from flare.machines.scheduler import Scheduler
from flare.machines.selection.board import Board
from flare.machines.selection.select import decide
from flare.machines.selection.view import Plan, View


class Host(Protocol):
    """What keeps the requests' tokens and carries out effects."""

    def execute(self, effects: Sequence[Effect], results: Sequence[LaneResult], now_ns: int) -> None:
        """Carry out effects in their order; `results` are those of the completion that they come from."""
        ...

    def lane(self, dispatch: Dispatch, shape: GraphShape, /) -> LaneInput:
        """The part of a frame of graph `shape` that serves one request."""
        ...

    def committed(self, effects: Sequence[Effect], view: View, now_ns: int) -> None:
        """A plan that was chosen from `view` was committed; its frame is submitted next."""
        ...


class Driver:
    """One scheduler, one device (`submit` takes its frames) and the host of their requests."""

    def __init__(self, scheduler: Scheduler, host: Host, submit: Callable[[Frame], None]) -> None:
        self._scheduler = scheduler
        self._host = host
        self._submit = submit

    def turn(self, completions: deque[Completion], now_ns: int) -> None:
        """Work off one instant: apply all `completions`, which it empties, then decide and submit.

        Raises whatever the scheduler, the host or the device raise, and `DeviceLost` for a completion that tells of it;
        the server cannot go on then.
        """
        while completions:
            completion = completions.popleft()
            if completion.lost:
                raise DeviceLost(completion.error)
            event = CompleteFrame(completion.fence, completion.device_ns, _records(completion), completion.error)
            self._host.execute(self._scheduler.apply(event, now_ns), completion.results, now_ns)
        while self._scheduler.accepts and self._scheduler.has_runnable:
            board = self._scheduler.board(now_ns)
            decision = decide(board)
            if decision.plan is None:
                break
            self._commit(decision.plan, board, now_ns)

    def _commit(self, plan: Plan, board: Board, now_ns: int) -> None:
        effects = self._scheduler.commit(plan, board, now_ns)
        self._host.committed(effects, board.view, now_ns)
        for effect in effects:
            if isinstance(effect, SubmitFrame):
                lanes = tuple([self._host.lane(dispatch, plan.shape) for dispatch in effect.lanes])
                self._submit(Frame(effect.fence, plan.shape, lanes, plan.allocates))


def _records(completion: Completion) -> tuple[CompletionRecord, ...]:
    """The scheduler's part of a completion."""
    sidecar = completion.confidence
    return tuple(
        [
            CompletionRecord(
                result.handle,
                result.committed,
                result.ended,
                result.verified,
                None if sidecar is None or not result.verified else _confidence(sidecar, result.handle.slot),
                result.survival,
            )
            for result in completion.results
        ]
    )


def _confidence(sidecar: NDArray[np.float32], slot: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """A slot's columns of the sidecar: conditional probabilities, and those of prefixes."""
    conditional, joint = sidecar[:, slot].tolist()
    return tuple(conditional), tuple(joint)
