"""The Virtual Token Counter: the client that has had the least is next (arXiv:2401.00588).

Owns the counters and the admission of its authors' server: prompts as separate batches, every ten decode steps.
Surprising rule: a client that comes back is lifted to the least counter of those that wait, so that nobody saves up a
claim; one that fits no more ends the admission, even if a smaller one would.
"""

from __future__ import annotations

from collections import deque

from ..iteration import Batch, Job, Pool, Work

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
_DECODE_STEPS = 10
_BATCH_TOKENS_LEAST = 3_072
_POOL_SHARE = 6


class VtcRule:
    """Counters by client; the cache is given token by token, for all output that a request may have."""

    block = 1

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self._queues: dict[str, deque[Job]] = {}
        self._steps = 0

    def arrive(self, job: Job, pool: Pool) -> None:
        """Behind its client's others; a client that nobody waited for is lifted."""
        queue = self._queues.setdefault(job.client, deque())
        if not queue:
            others = [self.counters[client] for client, jobs in self._queues.items() if jobs]
            own = self.counters.get(job.client, 0)
            self.counters[job.client] = max(own, min(others, default=own))
        queue.append(job)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """New prompts if it is time for some and any fit, else one step of everything that runs."""
        if not pool.running or self._steps >= _DECODE_STEPS:
            admitted = self._admit(pool)
            if admitted:
                self._steps = 0
                pool.running.extend(admitted)
                return Batch([Work(job, job.left) for job in admitted])
        self._steps += 1
        for job in pool.running:
            pool.allocate(job, job.total)
        return Batch([Work(job, 1) for job in pool.running])

    def _admit(self, pool: Pool) -> list[Job]:
        admitted: list[Job] = []
        prompts, most = 0, max(pool.capacity // _POOL_SHARE, _BATCH_TOKENS_LEAST)
        while len(pool.running) + len(admitted) < pool.slots:
            clients = [client for client, jobs in self._queues.items() if jobs]
            if not clients:
                break
            client = min(clients, key=lambda name: self.counters[name])
            job = self._queues[client][0]
            alone = not pool.running and not admitted
            crowded = prompts + job.prompt > most or self._peak([*pool.running, *admitted, job]) >= pool.capacity
            if crowded and not alone:
                break
            self._queues[client].popleft()
            pool.allocate(job, job.total)
            admitted.append(job)
            prompts += job.prompt
            self.counters[client] += PROMPT_WEIGHT * job.prompt
        return admitted

    @staticmethod
    def _peak(jobs: list[Job]) -> int:
        """The most tokens that these hold at once if all run to their limits: each leaves when it is done."""
        held = peak = 0
        lengths = ((job.output - max(job.produced, 1), job.prompt + max(job.produced, 1)) for job in jobs)
        for count, (left, size) in enumerate(sorted(lengths, reverse=True), 1):
            held += size
            peak = max(peak, held + left * count)
        return peak

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Every output token is charged; finished requests leave."""
        for job, _ in batch.works:
            self.counters[job.client] += OUTPUT_WEIGHT
        pool.running = [job for job in pool.running if job.produced < job.output]
