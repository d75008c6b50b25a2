"""vLLM's adaptive verification: always the same proposals, of which the batch verifies those that are worth their time.

Owns the controller: how likely each proposal is to be reached, and how many to verify by a table of costs that was
profiled at start. Does not own the scheduler (`vllm`). Surprising rule: all proposals are made before any is weighed,
so their time is spent whatever is verified. It is profiled at the context of the table, where vLLM takes 8,192 tokens;
that leans to its side.
"""

from __future__ import annotations

from itertools import accumulate

from flare.graphs.sim.costs import CostTable

from ..iteration import Batch, Job, Pool, Work
from .drafting import DraftingRule

_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
_BEYOND = (1_024, 2_048)
_PRIOR_MEAN = 0.7
_PRIOR_WEIGHT = 2.0


class AdaptiveVerificationRule(DraftingRule):
    """Makes `depth` proposals for each decoding request; a request's acceptance at each position is the share of
    what was accepted there of what was verified, from a prior of 0.7."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._verifying = False
        self._profile: dict[int, float] = {}
        self._seen: dict[Job, list[tuple[int, int]]] = {}
        self._before: list[int] = []

    def proposals(self, job: Job) -> int:
        """None at first: what is verified is chosen for the batch as a whole."""
        return super().proposals(job) if self._verifying else 0

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """What vLLM's rule schedules, and the likeliest proposals of all that decode, as many as pay."""
        self._verifying = False
        batch = super().schedule(pool, now_ms)
        self._verifying = True
        decoding = [place for place, work in enumerate(batch.works) if work.job.decoding]
        slots = sorted(
            ((-score, depth, place) for place in decoding for depth, score in enumerate(self._scores(batch, place), 1)),
        )
        works = list(batch.works)
        for _, depth, place in slots[: self._budget([-slot[0] for slot in slots], batch, pool)]:
            job = works[place].job
            if pool.allocate(job, job.done + 1 + depth):
                works[place] = Work(job, 1 + depth)
        self._before = [job.produced if job.decoding else 0 for job, _ in works]
        most = max((self.proposals(works[place].job) for place in decoding), default=0)
        return Batch(works, proposals=most)

    def _scores(self, batch: Batch, place: int) -> list[float]:
        """How likely it is that each proposal of a request, and all before it, are accepted."""
        job = batch.works[place].job
        seen = self._seen.setdefault(job, [(0, 0)] * self.depth)
        rates = ((right + _PRIOR_MEAN * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT) for tried, right in seen)
        return list(accumulate(rates, lambda reached, rate: reached * rate))[: self.proposals(job)]

    def _budget(self, scores: list[float], batch: Batch, pool: Pool) -> int:
        """How many of the likeliest proposals give the most tokens for their time."""
        decoding = sum(job.decoding for job, _ in batch.works)
        sampling = sum(job.left == tokens for job, tokens in batch.works)
        base = sum(tokens for _, tokens in batch.works)
        drafting_ms = self.depth * (pool.costs.draft.at(_padded(decoding)) if pool.costs.draft is not None else 0.0)
        best, most = 0, 0.0
        for count, tokens in enumerate(accumulate(scores, initial=float(sampling))):
            rate = tokens / (drafting_ms + self._verify_ms(base + count, pool.costs))
            if rate > most:
                best, most = count, rate
        return best

    def _verify_ms(self, targets: int, costs: CostTable) -> float:
        """The profile: a step over the captured sizes, linear beyond them."""
        if not self._profile:
            measured = [_measured(size, self.depth, costs) for size in (*_SIZES, *_BEYOND)]
            self._profile = dict(zip((*_SIZES, *_BEYOND), accumulate(measured, max), strict=True))
        if targets <= _SIZES[-1]:
            return self._profile[_padded(targets)]
        low, high = (_SIZES[-1], _BEYOND[0]) if targets <= _BEYOND[0] else _BEYOND
        share = (targets - low) / (high - low)
        return self._profile[low] + share * (self._profile[high] - self._profile[low])

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Learn from what was verified; forget who is finished."""
        for (job, tokens), before in zip(batch.works, self._before, strict=True):
            if before and tokens > 1:
                accepted = job.produced - before - 1
                seen = self._seen[job]
                for depth in range(min(accepted + 1, tokens - 1)):
                    tried, right = seen[depth]
                    seen[depth] = (tried + 1, right + (depth < accepted))
            if job.produced == job.output:
                self._seen.pop(job, None)
        super().ran(batch, pool, now_ms, took_ms)


def _padded(size: int) -> int:
    """The captured size that serves so much."""
    return next((each for each in _SIZES if each >= size), size)


def _measured(targets: int, depth: int, costs: CostTable) -> float:
    """A step of so many target positions, as it is profiled: of requests that verify all proposals."""
    rows = max(1, -(-targets // (1 + depth)))
    return costs.decode(rows, costs.reference_context) + costs.speculation(rows, targets / rows, 0)
