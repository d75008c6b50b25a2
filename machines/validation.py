"""Whether a completion is what its plan allows.

Owns the checks of every lane of a completed frame, and what each lane is found to have done. Changes nothing.
Surprising rule: service is the difference to the request's committed counter, never to a counter saved when the frame
was queued; a request that has ended or was cancelled since is not looked at any further.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from .events import CompleteFrame, CompletionRecord
from .execution import Request
from .graph import GraphKind
from .request import EndReason
from .selection.view import LaneWork
from .slot import Commit, StageWork


class Progress(msgspec.Struct, frozen=True):
    """Validated work of one lane: tokens, or (`stage`) an operation on its state. `targets` is how many positions a
    decode lane verified."""

    request: Request
    prompt_tokens: int
    output_tokens: int
    ended: EndReason | None
    targets: int = 0
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
            lane = _prompt(work, request, record) if request.prefills else _decode(work, request, record)
        if isinstance(lane, str):
            return (), f"malformed completion: slot {work.slot} {lane}"
        progress.append(lane)
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


def _decode(work: LaneWork, request: Request, record: CompletionRecord) -> Progress | str:
    served = record.committed - request.committed
    if not 1 <= served <= work.tokens:
        return f"committed {served} tokens instead of {'1' if work.tokens == 1 else f'1 to {work.tokens}'}"
    if request.produced + served > request.spec.max_tokens:
        return f"committed {served} tokens, beyond its limit"
    return _wrong_end(request, served, record) or Progress(request, 0, served, record.ended, work.tokens)


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
