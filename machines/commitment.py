"""Whether the lanes of a plan still stand where it found them.

Owns the checks of ownership, epochs, positions and output left that a commit makes (docs/scheduling.md, "Commit and
completion"). Does not own the window or the freshness of costs (`scheduler`). Surprising rule: selection is not run
again; a plan that is no longer the best, yet still possible, is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .graph import GraphKind, GraphShape
from .request import Request
from .selection.view import LaneWork, Phase, Plan
from .slot import FrameSlot
from .snapshot import QueuedOutputs, phase_of, queued_outputs


class CommitRefused(RuntimeError):
    """A plan no longer fits the state that it would be committed to; the message says why. Nothing has changed."""


def check_lanes(plan: Plan, resident: Sequence[Request | None], frames: Sequence[FrameSlot]) -> bool:
    """Whether one of the lanes needs completion feedback. Raises `CommitRefused` for a lane that cannot be served.

    `resident` is indexed by slot; `frames` are in flight, oldest first.
    """
    lanes = plan.lanes
    if not 0 < len(lanes) <= plan.shape.batch:
        raise CommitRefused(f"{plan.shape.name} cannot serve {len(lanes)} lanes")
    if len({work.slot for work in lanes}) != len(lanes):
        raise CommitRefused("a slot is served twice")
    served, feedback, queued = Phase(plan.shape.kind.value), False, queued_outputs(frames)
    for work in lanes:
        request = resident[work.slot]
        if request is None or request.handle != (work.slot, work.generation) or not request.runnable:
            raise CommitRefused(f"slot {work.slot} is no longer owned by generation {work.generation}")
        if phase_of(request) is not served:
            raise CommitRefused(f"slot {work.slot} is in phase {phase_of(request).value}")
        _check_work(request, work, plan.shape, queued)
        feedback = feedback or request.spec.needs_feedback
    return feedback


def _check_work(request: Request, work: LaneWork, shape: GraphShape, queued: QueuedOutputs) -> None:
    spec = request.spec
    if shape.kind is GraphKind.DECODE:
        assert request.handle is not None
        outputs, _ = queued.get(request.handle, (0, None))
        if work.tokens != 1 or request.produced + outputs >= spec.max_tokens:
            raise CommitRefused(f"slot {work.slot} has no output left")
        return
    reach = min(request.boundary() - request.consumed, shape.prefill_tokens)
    if work.start != request.consumed or not 0 < work.tokens <= reach:
        raise CommitRefused(f"slot {work.slot} stands at prompt token {request.consumed}, {reach} from its reach")
    if work.emits != (work.start + work.tokens == spec.prompt_tokens and spec.max_tokens > 0):
        raise CommitRefused(f"slot {work.slot} has its first output token at the end of its prompt alone")
