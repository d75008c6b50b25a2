"""TurboSpec: one number of proposals for the whole batch, by its goodput (arXiv:2406.14066).

Owns the controller: one estimate of acceptance for all requests, and the search for the number that gives the most
tokens per time; not to speculate counts a tenth more than it gives. Surprising rule: this leans to its side twice. It
knows the table itself, where its authors fit a line to a profile; and once it has stopped speculating, and so can learn
no more, it begins again from the start.
"""

from __future__ import annotations

from ..iteration import Batch, Pool
from .drafting import DraftingRule

_ALPHA_START = 0.7
_ALPHA_KEPT = 0.85
_EVERY = 20
_PLAIN_FAVOUR = 1.1
_CACHE_FACTOR = 1.1


class TurboSpecRule(DraftingRule):
    """At most `most` proposals."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.alpha = _ALPHA_START
        self._most = most
        self._steps = 0
        self._before: list[int] = []

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """Chooses anew every 20 steps in which somebody decodes."""
        decoding = [job for job in pool.running if job.decoding]
        if decoding:
            if self._steps % _EVERY == 0:
                if self.depth == 0:
                    self.alpha = _ALPHA_START
                self.depth = self._best(len(decoding), sum(job.done for job in decoding) / len(decoding), pool)
            self._steps += 1
        batch = super().schedule(pool, now_ms)
        self._before = [job.produced if job.decoding else 0 for job, _ in batch.works]
        return batch

    def _best(self, rows: int, context: float, pool: Pool) -> int:
        best, most = 0, 0.0
        for depth in range(self._most + 1):
            if depth and rows * (context + depth + 1) * _CACHE_FACTOR > pool.capacity * pool.block:
                break
            took_ms = pool.costs.decode(rows, context) + pool.costs.speculation(rows, depth + 1, depth)
            goodput = rows * sum(self.alpha**place for place in range(depth + 1)) / took_ms
            goodput *= 1.0 if depth else _PLAIN_FAVOUR
            if goodput < most:
                break
            best, most = depth, goodput
        return best

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """The estimate follows what this step accepted of what it verified."""
        proposed = accepted = 0
        for (job, tokens), before in zip(batch.works, self._before, strict=True):
            if before and tokens > 1:
                proposed += tokens - 1
                accepted += job.produced - before - 1
        if proposed:
            self.alpha = _ALPHA_KEPT * self.alpha + (1 - _ALPHA_KEPT) * accepted / proposed
        super().ran(batch, pool, now_ms, took_ms)
