"""Which round learns what it offers, worked out a second time.

Owns the choice among acceptance probes for the oracle. Does not own which candidates there are or what they may come to
(`choices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flare.machines.graph import GraphKind, Source
from flare.machines.selection.view import Phase

from .values import Values

if TYPE_CHECKING:
    from .choices import Choice


def offered(choice: Choice) -> dict[int, int]:
    """Proposals that a candidate is expected to verify, by slot: of its own rounds, not of one that follows."""
    if choice.draft.following is not None:
        return {}
    return {lane.row.slot: lane.tokens - 1 for lane in choice.draft.decoders if lane.row.phase is Phase.DECODE}


def added(choice: Choice, winner: Choice) -> list[float]:
    """The weights of the estimates that a candidate adds to what `winner` offers, where output is left to use them."""
    before, weights = offered(winner), []
    for lane in choice.draft.decoders:
        if lane.row.output_left <= lane.tokens:
            continue
        copied = choice.graph.shape.source is Source.COPY
        known = lane.row.copy_weights if copied else lane.row.weights
        weights += [known[depth - 1] for depth in range(before.get(lane.row.slot, 0) + 1, lane.tokens)]
    return weights


def probes(winner: Choice, rivals: list[Choice], values: Values, behind: float) -> list[Choice]:
    """The probes that gain most on `winner`, the best first; those too close to it to tell after it."""
    score = winner.draft.score
    found: list[tuple[tuple[Any, ...], Choice]] = []
    for choice in rivals:
        if choice.graph.shape.kind is not GraphKind.SPECULATIVE or choice.draft.score <= score:
            continue
        weights = added(choice, winner)
        if weights:
            gain, ms = choice.draft.score - score, values.ms(choice.graph)
            found.append(((-gain, min(weights), ms, choice.graph.shape), choice))
    found.sort(key=lambda one: one[0])
    if not found:
        return []
    most = -found[0][0][0]
    slack = behind * max(one.draft.gain + one.draft.cost for _, one in found)
    return [choice for key, choice in found if most + key[0] <= slack]
