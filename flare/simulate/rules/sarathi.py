"""Sarathi-Serve: prompts in chunks beside all decodes, so that none of them stalls (arXiv:2403.02310).

Owns the rule of its scheduler with a fixed chunk size. Surprising rule: decoding rows always go first and spend the
same budget as chunks, and a prompt's whole memory is reserved when its first chunk starts.
"""

from __future__ import annotations

from ..iteration import Batch, Job, Pool, Work

_WATERMARK = 0.01
"""Share of the blocks that admission leaves free."""


class SarathiRule:
    """`chunk` is the number of tokens of an iteration, decoding rows among them."""

    block = 16

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def arrive(self, job: Job, pool: Pool) -> None:
        """Behind the others."""
        pool.waiting.append(job)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """All decodes, then prompts under way, then new ones, oldest first."""
        pool.running.sort(key=lambda job: job.index)
        works = self._decodes(pool)
        room = self.chunk - len(works)
        for job in pool.running:
            if not job.decoding and room > 0:
                tokens = min(job.left, room)
                works.append(Work(job, tokens))
                room -= tokens
        watermark = _WATERMARK * pool.capacity
        while pool.waiting and room > 0 and len(pool.running) < pool.slots:
            job = pool.waiting[0]
            needed = pool.needed(job, job.total)
            # Whoever has the cache to itself may use all of it; it could otherwise wait for ever.
            if needed > pool.free or (pool.running and pool.free - needed < watermark):
                break
            pool.allocate(job, job.total)
            pool.running.append(pool.waiting.popleft())
            tokens = min(job.left, room)
            works.append(Work(job, tokens))
            room -= tokens
        return Batch(works)

    def _decodes(self, pool: Pool) -> list[Work]:
        works: list[Work] = []
        queue = list(pool.running)
        while queue:
            job = queue.pop(0)
            if not job.decoding:
                continue
            while not pool.allocate(job, job.total):
                victim = queue.pop() if queue else job
                pool.running.remove(victim)
                pool.preempt(victim)
                if victim is job:
                    break
            else:
                works.append(Work(job, 1))
        return works

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Finished requests leave."""
        pool.running = [job for job in pool.running if job.produced < job.output]
