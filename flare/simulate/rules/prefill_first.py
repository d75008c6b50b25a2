"""Prefill first, as SGLang does by default: prompts run alone, in large chunks, and decoding waits for them.

Owns the rule of its scheduler (first come first served, no mixed chunks, no prefix cache; scheduling is not a step
late). Surprising rule: memory is given on a guess of how much of their output running requests will use, and taken back
from some when the guess was wrong.
"""

from __future__ import annotations

from ..iteration import Batch, Job, Pool, Work

_PREFILL_TOKENS_MAX = 16_384
_OUTPUT_COUNTED_MAX = 4_096
_RATIO_START = 0.7
_RATIO_LEAST = 0.14 * _RATIO_START
_RATIO_STEPS = 600
_RETRACT_AHEAD = 20
"""Decode steps that a retraction makes room for."""


class PrefillFirstRule:
    """`chunk` is `chunked_prefill_size`."""

    block = 16

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self._chunked: Job | None = None
        self._full = False
        self._ratio = _RATIO_START

    def arrive(self, job: Job, pool: Pool) -> None:
        """Behind the others."""
        pool.waiting.append(job)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """Prompts alone while any can be admitted, else one step of everything that runs."""
        works = self._prefills(pool)
        return Batch(works if works else self._decodes(pool))

    def _prefills(self, pool: Pool) -> list[Work]:
        if self._chunked is None and (self._full or not pool.waiting):
            return []
        works: list[Work] = []
        room, chunk = _PREFILL_TOKENS_MAX, self.chunk
        reserved = sum(self._counted(job) for job in pool.running) * self._ratio
        spare = pool.free * pool.block - reserved
        if self._chunked is not None:
            job = self._chunked
            tokens = min(job.left, chunk)
            works.append(Work(job, tokens))
            room, chunk = room - tokens, chunk - tokens
            if tokens == job.left:
                self._chunked = None
        while pool.waiting and room > 0 and chunk > 0 and len(pool.running) < pool.slots:
            job = pool.waiting[0]
            needed = pool.needed(job, job.total) * pool.block + self._counted(job) + pool.block
            # An empty server takes whatever its cache can hold.
            if needed > spare and (pool.running or works):
                self._full = True
                break
            tokens = job.left if job.left <= chunk else chunk // pool.block * pool.block
            if tokens == 0:
                break
            pool.allocate(job, job.total)
            pool.running.append(pool.waiting.popleft())
            works.append(Work(job, tokens))
            spare -= needed
            room, chunk = room - tokens, chunk - tokens
            if tokens < job.left:
                self._chunked = job
                break
        return works

    def _decodes(self, pool: Pool) -> list[Work]:
        jobs = [job for job in pool.running if job.decoding]
        if sum(pool.needed(job, job.total) for job in jobs) > pool.free:
            jobs = self._retract(jobs, pool)
        self._ratio = max(_RATIO_LEAST, self._ratio - (_RATIO_START - _RATIO_LEAST) / _RATIO_STEPS)
        for job in jobs:
            pool.allocate(job, job.total)
        return [Work(job, 1) for job in jobs]

    def _retract(self, jobs: list[Job], pool: Pool) -> list[Job]:
        """Give back the caches of those with the least output, of equals the longest prompt, until a step fits."""
        kept = sorted(jobs, key=lambda job: (-job.produced, job.prompt))
        while len(kept) > 1 and sum(pool.needed(job, job.total) for job in kept) > pool.free:
            victim = kept.pop()
            pool.running.remove(victim)
            pool.preempt(victim)
            pool.waiting.append(pool.waiting.popleft())
        produced = sum(job.produced for job in kept) + _RETRACT_AHEAD * len(kept)
        self._ratio = min(1.0, produced / (sum(job.output for job in kept) + 1))
        return kept

    @staticmethod
    def _counted(job: Job) -> int:
        return min(job.output - job.produced, _OUTPUT_COUNTED_MAX)

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Finished requests leave, and with them the mark that the batch is full."""
        before = len(pool.running)
        pool.running = [job for job in pool.running if job.produced < job.output]
        if len(pool.running) < before:
            self._full = False
