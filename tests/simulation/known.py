"""What the second account keeps of one request: how far it is, what it holds and what lies ahead of it.

Owns the way of a request through its stages, laid out once from its record. Surprising rule: a way is a list of
stages and of the prompt positions between them; whatever stands before the first position is due now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from flare.machines.graph import GraphKind, Source
from flare.machines.ids import PageId, RequestHandle, RequestId, StateRow
from flare.machines.request import RequestSpec

from .acceptance_oracle import Estimates
from .price_oracle import Rates


class Stage(Enum):
    """How far a request is."""

    QUEUED = "queued"
    BLOCKED = "blocked"
    PROMPT = "prompt"
    DECODE = "decode"
    LEAVING = "leaving"
    AWAY = "away"
    RETIRING = "retiring"
    OVER = "over"


class Step(NamedTuple):
    """A stage on the way; `operation` counts the image operations of one window, `prefix` is what a restore brings."""

    kind: GraphKind
    operation: int = 0
    prefix: int = 0


Way = list[Step | int]


def way_of(spec: RequestSpec) -> Way:
    """Stages in their order, and the prompt positions that are to be reached between them."""
    return list(_way(spec))


def _way(spec: RequestSpec) -> Iterator[Step | int]:
    start = spec.restored_tokens
    if spec.initialize:
        yield Step(GraphKind.INITIALIZE)
    if start:
        yield Step(GraphKind.RESTORE, prefix=start)
    windows = {window.start: window for window in spec.windows if window.start >= start}
    first = min(windows, default=0)
    saved = {position for position in spec.checkpoints if position > start}
    for position in sorted({*windows, *saved, spec.prompt_tokens}):
        if position > start:
            yield position
        if position in windows and position > first:
            yield from (Step(GraphKind.SNAPSHOT), Step(GraphKind.RESTORE))
        elif position in saved:
            yield Step(GraphKind.SNAPSHOT)
        if position in windows:
            yield from [Step(GraphKind.VISION, operation) for operation in range(windows[position].operations)]


@dataclass(slots=True)
class Known:
    """One request. `bound`: a frame has carried its present handle. `away` numbers those that lost their slot.
    `offered` proposals can be copied for it."""

    id: RequestId
    spec: RequestSpec
    arrived_ns: int
    way: Way
    stage: Stage = Stage.QUEUED
    handle: RequestHandle | None = None
    pages: tuple[PageId, ...] = ()
    state_row: StateRow | None = None
    bound: bool = False
    consumed: int = 0
    produced: int = 0
    last_fence: int = 0
    visible_ns: int = 0
    terminal_ns: int = 0
    away: int = 0
    rates: Rates = field(default_factory=Rates)
    estimates: dict[Source, Estimates] = field(default_factory=dict)
    forecast: Estimates | None = None
    offered: int = 0

    @property
    def live(self) -> bool:
        """Whether it takes part in service."""
        return self.stage in (Stage.BLOCKED, Stage.PROMPT, Stage.DECODE)

    @property
    def terminal(self) -> bool:
        """Whether only a snapshot is left."""
        return self.stage in (Stage.LEAVING, Stage.RETIRING)

    @property
    def advances(self) -> bool:
        """Whether it takes what frames in flight bring."""
        return self.live or self.stage is Stage.LEAVING

    @property
    def waits(self) -> bool:
        """Whether it waits for a slot."""
        return self.stage in (Stage.QUEUED, Stage.AWAY)

    @property
    def prefills(self) -> bool:
        """Whether prompt tokens are left."""
        return self.consumed < self.spec.prompt_tokens

    @property
    def committed(self) -> int:
        """Context tokens."""
        return self.consumed + self.produced

    @property
    def needs_row(self) -> bool:
        """Whether its state is saved on its way."""
        spec = self.spec
        windows = sum(window.start >= spec.restored_tokens for window in spec.windows)
        return windows > 1 or any(position > spec.restored_tokens for position in spec.checkpoints)

    @property
    def due(self) -> list[Step]:
        """The stages before it can go on."""
        steps: list[Step] = []
        for step in self.way:
            if not isinstance(step, Step):
                break
            steps.append(step)
        return steps

    @property
    def position(self) -> int:
        """Where its prompt goes on once what is due is done."""
        return max([self.consumed, *(step.prefix for step in self.due)])

    @property
    def boundary(self) -> int:
        """Where the next chunk must stop at the latest."""
        stop = next((step for step in self.way if isinstance(step, int)), self.spec.prompt_tokens)
        return min(stop, self.spec.system_end) if self.position < self.spec.system_end else stop

    def go_on(self) -> None:
        """Stand where its way says."""
        if self.due:
            self.stage = Stage.BLOCKED
        else:
            self.stage = Stage.PROMPT if self.prefills else Stage.DECODE
