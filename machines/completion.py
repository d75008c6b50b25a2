"""What a completed frame does to the requests that it served.

Owns the moves that follow from validated progress and from a failed frame (docs/scheduling.md, "Commit and
completion"). Does not own validation, accounts or frames. Surprising rule: a failed frame costs a request that retires
nothing, since its answer is complete; it only gives up its snapshot, for nobody knows what its row holds now.
"""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import observations
from .beliefs import Population
from .events import Deliver, Effect, RequestLost, Retired
from .execution import Request
from .graph import GraphKind, Source
from .lifecycle import (
    Blocked,
    ChunkCommitted,
    Fail,
    OutputReady,
    PromptCommitted,
    PromptReady,
    RequestState,
    Retire,
    StageCommitted,
    TokensCommitted,
)
from .roster import Roster
from .slot import Commit
from .validation import Progress
from .windows import WindowState


def advance(lane: Progress, commit: Commit, roster: Roster, now_ns: int, effects: list[Effect]) -> None:
    """Move a request by the validated work of one lane, and have its results delivered."""
    request = lane.request
    if lane.stage is not None:
        _finish_stage(request, commit.plan.shape.kind, roster, effects)
        return
    roster.waiting.serve(request.spec.client, lane.prompt_tokens, lane.output_tokens)
    request.offered = 0  # what the host found to copy went on from where it stood
    assert request.handle is not None
    handle = request.handle
    if not lane.prompt_tokens:
        roster.move(request, TokensCommitted(lane.output_tokens), effects)
        _learn(lane, commit.plan.shape.source, roster.population)
    elif request.consumed + lane.prompt_tokens == request.spec.prompt_tokens:
        roster.move(request, PromptCommitted(lane.prompt_tokens, now_ns), effects)
    else:
        roster.move(request, ChunkCommitted(lane.prompt_tokens), effects)
    if lane.ended is not None:
        roster.end(request, lane.ended, now_ns, effects)
    elif request.stages and request.state is not RequestState.PREEMPTING:
        roster.move(request, Blocked(), effects)
    if lane.output_tokens or lane.ended is not None or request.spec.scored:
        effects.append(Deliver(request.id, handle, commit.fence, lane.ended))


def fail(lanes: Sequence[Request | None], error: str, roster: Roster, effects: list[Effect]) -> None:
    """End what a failed or malformed frame served, as far as it is not over. `lanes` are as for `validate`."""
    for request in lanes:
        if request is None:
            continue
        if request.state is RequestState.RETIRING:
            _retire(request, roster, effects)
        elif request.advances:
            roster.move(request, Fail(), effects)
            effects.append(RequestLost(request.id, error))


def _finish_stage(request: Request, kind: GraphKind, roster: Roster, effects: list[Effect]) -> None:
    if request.state is RequestState.PREEMPTING:
        roster.park(request, effects)
    elif request.state is RequestState.RETIRING:
        _retire(request, roster, effects)
    else:
        row = request.state_row
        roster.move(request, StageCommitted(kind), effects)
        if row is not None and request.state_row is None:
            roster.state_rows.release(row, request.id, request.last_fence)
        if kind is GraphKind.SNAPSHOT and request.windows.state is WindowState.RESTORING:
            roster.rebind(request, effects)
        if not request.stages:
            roster.move(request, PromptReady() if request.prefills else OutputReady(), effects)


def _retire(request: Request, roster: Roster, effects: list[Effect]) -> None:
    roster.move(request, Retire(), effects)
    effects.append(Retired(request.id))


def _learn(lane: Progress, source: Source, population: Population) -> None:
    """A round that offered proposals tells how many were accepted, and what the program expected."""
    beliefs, tokens = lane.request.beliefs, lane.request.produced
    if beliefs is None:
        return
    if lane.targets > 1:
        ended = lane.ended is not None
        seen = observations(lane.targets, lane.output_tokens, ended=ended, survival=lane.survival)
        population.accept(beliefs, source, seen, tokens)
    if lane.joint:
        population.forecast(beliefs, lane.joint, tokens)
