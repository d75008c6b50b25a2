"""Whether the lanes of a plan still stand where it found them, and what a stage frame does for them.

Owns the checks of ownership, epochs, phases, positions, stages and output left that a commit makes
(docs/scheduling.md, "Commit and completion"). Does not own the window or the freshness of costs (`scheduler`).
Surprising rule: selection is not run again; a plan that is no longer the best, yet still possible, is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from .execution import Request
from .graph import SNAPSHOT_KINDS, STAGE_KINDS, GraphKind, GraphShape, Source
from .roster import Roster
from .selection.view import LaneWork, Phase, Plan
from .slot import FrameSlot, StageWork
from .snapshot import QueuedOutputs, phase_of, queued_outputs

_PHASES = {
    GraphKind.PREFILL: (Phase.PREFILL,),
    GraphKind.SCORED_PREFILL: (Phase.SCORED_PREFILL,),
    GraphKind.DECODE: (Phase.DECODE,),
    GraphKind.SPECULATIVE: (Phase.DECODE,),
    GraphKind.MIXED: (Phase.PREFILL, Phase.DECODE),
}
"""The phases that each kind of inference serves."""


class CommitRefused(RuntimeError):
    """A plan no longer fits the state that it would be committed to; the message says why. Nothing has changed."""


def check_lanes(plan: Plan, roster: Roster, frames: Sequence[FrameSlot]) -> bool:
    """Whether one of the lanes needs completion feedback. Raises `CommitRefused` for a lane that cannot be served.

    `frames` are in flight, oldest first.
    """
    lanes, shape = plan.lanes, plan.shape
    if not 0 < len(lanes) <= shape.batch:
        raise CommitRefused(f"{shape.name} cannot serve {len(lanes)} lanes")
    if len({work.slot for work in lanes}) != len(lanes):
        raise CommitRefused("a slot is served twice")
    feedback, queued = shape.source is Source.COPY, queued_outputs(frames)  # a copy goes on from what the host knows
    prompts = prompt_tokens = targets = 0
    for work in lanes:
        request = roster.owner(work.slot, work.generation)
        if request is None or not (request.runnable or request.terminal):
            raise CommitRefused(f"slot {work.slot} is no longer owned by generation {work.generation}")
        if shape.kind in STAGE_KINDS:
            _check_stage(request, work, shape.kind)
            continue
        _check_phase(request, work, shape.kind)
        if request.prefills:
            _check_prompt(request, work, shape)
            prompts, prompt_tokens = prompts + 1, prompt_tokens + work.tokens
        else:
            _check_decode(request, work, shape, queued)
            targets += work.tokens
        feedback = feedback or request.spec.needs_feedback
    if prompt_tokens > shape.prefill_tokens or (shape.kind is GraphKind.MIXED and prompts > shape.prompt_rows):
        raise CommitRefused(f"{shape.name} cannot consume {prompt_tokens} tokens of {prompts} prompts")
    if shape.packed_targets and targets > shape.packed_targets and not plan.allocates:
        raise CommitRefused(f"{shape.name} cannot verify {targets} targets")
    return feedback


def stage_work(request: Request, kind: GraphKind) -> StageWork:
    """What a frame of a stage kind does for a request that `check_lanes` has passed."""
    retires = request.terminal
    if retires:
        parks = request.end_reason is None
        return StageWork(request.state_row if parks else None, retires=True)
    if kind is GraphKind.VISION:
        return StageWork(operation=request.windows.encoded)
    if kind is GraphKind.RESTORE and request.restores_prefix:
        return StageWork(restored_tokens=request.spec.restored_tokens)
    return StageWork(None if kind is GraphKind.INITIALIZE else request.state_row)


def _check_phase(request: Request, work: LaneWork, kind: GraphKind) -> None:
    phase = phase_of(request)
    if phase not in _PHASES[kind]:
        raise CommitRefused(f"slot {work.slot} is in phase {phase.value}")
    if request.stages:
        raise CommitRefused(f"slot {work.slot} stands before {request.stages[0].value}")


def _check_stage(request: Request, work: LaneWork, kind: GraphKind) -> None:
    if request.terminal:
        if kind not in SNAPSHOT_KINDS:
            raise CommitRefused(f"slot {work.slot} is in phase {Phase.TERMINAL.value}")
    elif request.stages[:1] != (kind,):
        stage = request.stages[0].value if request.stages else "none"
        raise CommitRefused(f"slot {work.slot} does not stand before {kind.value}: its stage is {stage}")
    if work.start != request.position or work.tokens or work.emits or work.delivers:
        raise CommitRefused(f"slot {work.slot} stands at prompt token {request.position}, and a stage gives no tokens")


def _check_decode(request: Request, work: LaneWork, shape: GraphShape, queued: QueuedOutputs) -> None:
    spec = request.spec
    assert request.handle is not None
    outputs, _ = queued.get(request.handle, (0, None))
    reach = min(1 + _proposals(request, shape), shape.width, spec.max_tokens - request.produced - outputs)
    if not 0 < work.tokens <= reach or not work.emits:
        raise CommitRefused(f"slot {work.slot} has no output left for {work.tokens} targets: its reach is {reach}")


def _proposals(request: Request, shape: GraphShape) -> int:
    """How many there can be for a request."""
    if request.beliefs is None:
        return 0
    return min(shape.draft_depth, request.offered) if shape.source is Source.COPY else shape.draft_depth


def _check_prompt(request: Request, work: LaneWork, shape: GraphShape) -> None:
    spec = request.spec
    reach = min(request.boundary() - request.consumed, shape.prefill_tokens)
    if work.start != request.consumed or not 0 < work.tokens <= reach:
        raise CommitRefused(f"slot {work.slot} stands at prompt token {request.consumed}, {reach} from its reach")
    end = work.start + work.tokens
    if any(start < end < beyond for start, beyond in spec.spans):
        raise CommitRefused(f"slot {work.slot} may not stop at prompt token {end}, inside an atomic span")
    if work.emits != (end == spec.prompt_tokens and spec.max_tokens > 0):
        raise CommitRefused(f"slot {work.slot} has its first output token at the end of its prompt alone")
