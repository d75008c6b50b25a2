"""What the engine tells of itself: effects become trace lines and metrics.

Owns the mapping from the scheduler's effects to `flare/trace_events` and `flare/metrics`. Decides nothing. Surprising
rule: without a trace, moves are not even turned into records, because they are made for every frame.
"""

from __future__ import annotations

from collections.abc import Iterable

from flare.machines.durations import DurationTable
from flare.machines.events import Effect, FrameCounted, LedgerMoved, RequestMoved, SlotMoved, SubmitFrame, WindowMoved
from flare.machines.selection.view import Reason, View
from flare.metrics import Execution, Metrics
from flare.trace import TraceWriter
from flare.trace_events import (
    FrameCompleted,
    LedgerTransition,
    RequestTransition,
    SlotTransition,
    WindowTransition,
    plan_committed,
)

_EXECUTIONS = {
    Reason.ORDINARY: Execution.ORDINARY,
    Reason.DISCOVERY: Execution.DISCOVERY,
    Reason.TIMING_REFRESH: Execution.TIMING_REFRESH,
    Reason.ACCEPTANCE_PROBE: Execution.ACCEPTANCE_LEARNING,
}


class Reporter:
    """Writes the trace, if there is one, and counts for the metrics."""

    def __init__(self, metrics: Metrics, durations: DurationTable, trace: TraceWriter | None, *, views: bool) -> None:
        self.metrics = metrics
        self._durations = durations
        self._trace = trace
        self._views = views
        self._plans = 0

    def effects(self, effects: Iterable[Effect], now_ns: int) -> None:
        """Report what happened at `now_ns`."""
        for effect in effects:
            if isinstance(effect, FrameCounted):
                self._frame(effect, now_ns)
            elif self._trace is not None:
                self._moved(effect, now_ns, self._trace)

    def committed(self, submit: SubmitFrame, view: View) -> None:
        """Report a plan that was committed."""
        self._plans += 1
        if self._trace is not None:
            self._trace.emit(plan_committed(self._plans, submit, view, with_view=self._views))

    @staticmethod
    def _moved(effect: Effect, now_ns: int, trace: TraceWriter) -> None:
        match effect:
            case RequestMoved(request, handle, before, after, cause):
                trace.emit(RequestTransition(now_ns, request, handle, before, after, cause))
            case SlotMoved(frame_slot, fence, before, after, cause):
                trace.emit(SlotTransition(now_ns, frame_slot, fence, before, after, cause))
            case WindowMoved(request, before, after, cause):
                trace.emit(WindowTransition(now_ns, request, before, after, cause))
            case LedgerMoved(ledger, before, after, cause, credit_ns):
                trace.emit(LedgerTransition(now_ns, ledger, before, after, cause, credit_ns))
            case _:
                pass

    def _frame(self, frame: FrameCounted, now_ns: int) -> None:
        name = frame.shape.name
        if frame.error is None:
            self.metrics.frame_completed(
                _EXECUTIONS[frame.reason], name, frame.device_ns, frame.prompt_tokens, frame.output_tokens
            )
            if frame.rounds:
                self.metrics.speculative.program(frame.shape.source, frame.rounds)
            self.metrics.graph_estimated(name, self._durations.row(frame.shape, now_ns).duration_ns)
        if self._trace is not None:
            committed = frame.prompt_tokens + frame.output_tokens
            self._trace.emit(
                FrameCompleted(now_ns, frame.fence, name, frame.device_ns, frame.wall_ns, committed, frame.error)
            )
