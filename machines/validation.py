"""Whether a completion is what its plan allows.

Owns the checks of every lane of a completed frame, and what each lane is found to have done. Changes nothing.
Surprising rule: service is the difference to the request's committed counter, never to a counter saved when the frame
was queued; a request that has ended or was cancelled since is not looked at any further.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest

import msgspec

from .events import CompleteFrame, CompletionRecord
from .execution import Request
from .graph import GraphKind, GraphShape, Source
from .request import EndReason
from .selection.view import LaneWork, Plan
from .slot import Commit, StageWork


class Progress(msgspec.Struct, frozen=True):
    """Validated work of one lane: tokens, or (`stage`) an operation on its state.

    `targets` is how many positions a decode lane verified; `joint` has the probabilities that the program gave to the
    prefixes below the lane's ceiling, and `survival` those of what was verified, where it knows them.
    """

    request: Request
    prompt_tokens: int
    output_tokens: int
    ended: EndReason | None
    targets: int = 0
    joint: tuple[float, ...] = ()
    survival: tuple[float, ...] | None = None
    stage: StageWork | None = None


def validate(
    commit: Commit, lanes: Sequence[Request | None], event: CompleteFrame
) -> tuple[tuple[Progress, ...], str | None]:
    """The progress of each lane that still counts, and None; or nothing, and what is wrong with the frame.

    `lanes` are the present owners of the executions that the plan serves, in the plan's order; None: it has gone.
    """
    if event.error is not None:
        return (), event.error
    plan = commit.plan
    if [record.handle for record in event.records] != [(work.slot, work.generation) for work in plan.lanes]:
        return (), "malformed completion: its lanes are not those of the frame"
    progress = []
    for work, request, record, stage in zip_longest(plan.lanes, lanes, event.records, commit.stages):
        if request is None or not _counts(request, stage):
            continue
        if stage is not None:
            lane = _stage(plan.shape.kind, stage, request, record)
        else:
            lane = _prompt(work, request, record) if request.prefills else _decode(plan, work, request, record)
        if isinstance(lane, str):
            return (), f"malformed completion: slot {work.slot} {lane}"
        progress.append(lane)
    targets, packed = sum([lane.targets for lane in progress]), plan.shape.packed_targets
    if packed and targets > packed:
        return (), f"malformed completion: it verified {targets} targets in {packed} rows"
    return tuple(progress), None


def _counts(request: Request, stage: StageWork | None) -> bool:
    """Whether what a frame did for a request still matters to it."""
    if stage is None:
        return request.advances
    return request.terminal if stage.retires else request.runnable


def _prompt(work: LaneWork, request: Request, record: CompletionRecord) -> Progress | str:
    served, output = record.committed - request.committed, int(work.emits)
    if served != work.tokens + output:
        return f"committed {served} tokens instead of {work.tokens + output}"
    if request.spec.max_tokens == 0 and request.consumed + work.tokens == request.spec.prompt_tokens:
        return Progress(request, work.tokens, 0, EndReason.LENGTH)
    return _wrong_end(request, output, record) or Progress(request, work.tokens, output, record.ended)


def _decode(plan: Plan, work: LaneWork, request: Request, record: CompletionRecord) -> Progress | str:
    served, targets = record.committed - request.committed, record.verified or work.tokens
    if not 1 <= targets <= work.tokens:
        return f"verified {targets} targets instead of {_up_to(work.tokens)}"
    if not 1 <= served <= targets:
        return f"committed {served} tokens instead of {_up_to(targets)}"
    if request.produced + served > request.spec.max_tokens:
        return f"committed {served} tokens, beyond its limit"
    wrong = _wrong_end(request, served, record) or _wrong_confidence(plan, record) or _wrong_survival(targets, record)
    if wrong is not None:
        return wrong
    joint = () if record.confidence is None else record.confidence[1][: work.tokens - 1]
    return Progress(request, 0, served, record.ended, targets, joint, record.survival)


def _up_to(most: int) -> str:
    return "1" if most == 1 else f"1 to {most}"


def _wrong_confidence(plan: Plan, record: CompletionRecord) -> str | None:
    if record.confidence is None:
        return "has no confidence, by which rows are allocated" if plan.allocates else None
    if not _drafts(plan.shape):
        return "has confidence in proposals that the program did not make"
    depth, planes = plan.shape.draft_depth, record.confidence
    if [len(plane) for plane in planes] != [depth, depth]:
        return f"has confidence in other than {depth} proposals"
    if not all(_probable(plane) for plane in planes) or _rises(planes[1]):
        return "has confidence that is no probability, or a longer prefix that is likelier"
    return None


def _wrong_survival(targets: int, record: CompletionRecord) -> str | None:
    if record.survival is None:
        return None
    count, offered = len(record.survival), targets - 1
    if count > offered or (count < offered and record.ended is None):
        return f"has survival of {count} prefixes instead of {offered}"
    if not _probable(record.survival) or _rises(record.survival):
        return "has survival that is no probability, or a longer prefix that is likelier"
    return None


def _drafts(shape: GraphShape) -> bool:
    return shape.draft_depth > 0 and shape.source is Source.DRAFT


def _probable(values: Sequence[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in values)  # not of NaN


def _rises(values: Sequence[float]) -> bool:
    return any(after > before for before, after in pairwise(values))


def _wrong_end(request: Request, output: int, record: CompletionRecord) -> str | None:
    if record.ended is not None and not output:
        return "ended without an output token"
    full = output > 0 and request.produced + output == request.spec.max_tokens
    if full and record.ended is None:
        return "reached its limit and did not end"
    if record.ended is EndReason.LENGTH and not full:
        return "ended by length before its limit"
    return None


def _stage(kind: GraphKind, stage: StageWork, request: Request, record: CompletionRecord) -> Progress | str:
    expected = request.committed
    if kind is GraphKind.RESTORE and stage.restored_tokens:
        expected = stage.restored_tokens
    # A host's stop leaves rounds in flight uncounted; a row that is only given up may have gone on with them.
    beyond = stage.retires and stage.state_row is None and record.committed > expected
    if record.committed != expected and not beyond:
        return f"stands at {record.committed} tokens instead of {expected}"
    if record.ended is not None:
        return "ended without an output token"
    return Progress(request, 0, 0, None, stage=stage)
