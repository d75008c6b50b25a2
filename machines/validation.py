"""Whether a completion is what its plan allows.

Owns the checks of every lane of a completed frame, and what each lane is found to have done. Changes nothing.
Surprising rule: service is the difference to the request's committed counter, never to a counter saved when the frame
was queued; a request that has ended or was cancelled since is not looked at any further.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .events import CompleteFrame, CompletionRecord
from .request import EndReason, Request
from .selection.view import LaneWork, Plan


class Progress(msgspec.Struct, frozen=True):
    """Validated work of one lane. `scored` means that its prompt was all it wanted, and is complete."""

    request: Request
    prompt_tokens: int
    output_tokens: int
    ended: EndReason | None
    scored: bool = False


def validate(
    plan: Plan, lanes: Sequence[Request | None], event: CompleteFrame
) -> tuple[tuple[Progress, ...], str | None]:
    """The progress of each lane that still counts, and None; or nothing, and what is wrong with the frame.

    `lanes` are the present owners of the plan's slots, in the plan's order.
    """
    if event.error is not None:
        return (), event.error
    if [record.handle for record in event.records] != [(work.slot, work.generation) for work in plan.lanes]:
        return (), "malformed completion: its lanes are not those of the frame"
    progress = []
    for work, request, record in zip(plan.lanes, lanes, event.records, strict=True):
        if request is None or request.handle != record.handle or not request.runnable:
            continue
        lane = _lane(work, request, record)
        if isinstance(lane, str):
            return (), f"malformed completion: slot {work.slot} {lane}"
        progress.append(lane)
    return tuple(progress), None


def _lane(work: LaneWork, request: Request, record: CompletionRecord) -> Progress | str:
    spec = request.spec
    served = record.committed - request.committed
    if request.consumed < spec.prompt_tokens:
        prompt, output = work.tokens, int(work.emits)
    else:
        prompt, output = 0, 1
    if served != prompt + output:
        return f"committed {served} tokens instead of {prompt + output}"
    complete = request.consumed + prompt == spec.prompt_tokens
    if complete and spec.max_tokens == 0:
        return Progress(request, prompt, 0, EndReason.LENGTH, scored=True)
    if record.ended is not None and not output:
        return "ended without an output token"
    full = output > 0 and request.produced + output == spec.max_tokens
    if full and record.ended is None:
        return "reached its limit and did not end"
    if record.ended is EndReason.LENGTH and not full:
        return "ended by length before its limit"
    return Progress(request, prompt, output, record.ended)
