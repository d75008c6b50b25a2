"""Requests that a driver serves in rounds, step by step.

Owns what a host tells a program of a request: widths, copies, penalties' history. Does not own the checks
(`exact_rounds`). Surprising rule: a request that is decoded plainly goes through the same code, with a width of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from flare.graphs.frames import History, LaneInput, LaneResult, Sampling, TokenScore
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import RequestHandle
from flare.machines.request import EndReason
from tests.graphs.programs_driver import GREEDY, Driver

Copies = Callable[["Row", int], Sequence[int]]
"""Proposals for a row, of this number."""


@dataclass
class Row:
    """A request and what it has given; `ban` may not be drawn for its first `minimum` tokens."""

    prompt: list[int]
    sampling: Sampling = GREEDY
    limit: int = 24
    stop: tuple[int, ...] = ()
    logprobs: int | None = None
    ban: tuple[int, ...] = ()
    minimum: int = 0
    handle: RequestHandle = field(default_factory=lambda: RequestHandle(0, 0))
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    ended: EndReason | None = None
    counts: list[int] = field(default_factory=list)
    """How many tokens each round gave."""

    def fresh(self) -> Row:
        """The same request, not begun."""
        return replace(self, handle=RequestHandle(0, 0), tokens=[], scores=[], ended=None, counts=[])

    def history(self) -> History | None:
        """What penalties and bans need, if there are any."""
        if not (self.sampling.penalised or self.minimum):
            return None
        seen = sorted({*self.prompt, *self.tokens})
        counts = [self.tokens.count(token) for token in seen]
        left = max(0, self.minimum - len(self.tokens))
        ban = self.ban if left else ()
        return History(np.array(seen, np.int32), np.array(counts, np.int32), ban, max(1, left))

    def begin(self, driver: Driver, slot: int, chunk: int | None = None) -> None:
        """Consume the prompt, in chunks."""
        self.handle, results = driver.prompt(
            slot,
            self.prompt,
            self.sampling,
            chunk=chunk,
            limit=self.limit,
            stop=self.stop,
            logprobs=self.logprobs,
            history=self.history(),
        )
        self.take(results[-1])

    def lane(self, width: int, copies: Copies | None = None) -> LaneInput:
        """Of a round of at most `width` positions."""
        width = min(width, self.limit - len(self.tokens))
        given = np.array(copies(self, width - 1), np.int32) if copies is not None and width > 1 else None
        return LaneInput(self.handle, 0, True, history=self.history(), width=width, proposals=given)

    def take(self, result: LaneResult) -> None:
        """Count a result in."""
        self.tokens += result.tokens
        self.scores += result.scores or ()
        self.ended = result.ended
        self.counts.append(len(result.tokens))


def shape_of(width: int, batch: int = 4, *, copied: bool = False) -> GraphShape:
    """A rectangular program."""
    source = Source.COPY if copied and width > 1 else Source.DRAFT
    return rectangular(GraphKind.SPECULATIVE, batch, width, source=source)


def step(driver: Driver, rows: Sequence[Row], widths: Sequence[int], copies: Copies | None = None) -> None:
    """One round of the rows that have not ended, each with its width."""
    shape = shape_of(max(widths), driver.slots, copied=copies is not None)
    live = [(row, row.lane(width, copies)) for row, width in zip(rows, widths, strict=True) if row.ended is None]
    for (row, _), result in zip(live, driver.run(shape, [lane for _, lane in live]), strict=True):
        row.take(result)


def finish(driver: Driver, rows: Sequence[Row], width: int = 1, copies: Copies | None = None) -> None:
    """Rounds until all rows have ended."""
    while any(row.ended is None for row in rows):
        step(driver, rows, [width] * len(rows), copies)


def proposals(driver: Driver, lanes: Sequence[int]) -> list[list[int]]:
    """What was proposed in the round that has just run, to lanes of these widths."""
    tokens, first = driver.program.buffers.tokens.tolist(), np.cumsum([0, *lanes])
    return [tokens[at + 1 : at + width] for at, width in zip(first, lanes, strict=False)]


def confidence(driver: Driver) -> torch.Tensor:
    """The conditional and the joint probability of each proposal, float32[2, slots, depth]."""
    return driver.program.buffers.confidence.clone()
