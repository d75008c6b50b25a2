"""vLLM V1: one token budget for each iteration, running requests first.

Owns the rule of vLLM's `Scheduler.schedule` (v1, first come first served, chunked prefill on, no prefix cache). Does
not own how many proposals are verified (`drafting`; none here). Surprising rule: the budget makes no difference between
decoding and prefilling; a request under way keeps its place in line, and new ones get what is left.
"""

from __future__ import annotations

from ..iteration import Batch, Job, Pool, Work


class VllmRule:
    """`budget` is `max_num_batched_tokens`."""

    block = 16

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def arrive(self, job: Job, pool: Pool) -> None:
        """Behind the others."""
        pool.waiting.append(job)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """Running requests in order of admission, then new ones, until the budget is spent."""
        works: list[Work] = []
        budget, place, preempted = self.budget, 0, False
        while place < len(pool.running):
            job = pool.running[place]
            tokens = min(job.left + (self.proposals(job) if job.decoding else 0), budget)
            if tokens == 0:
                break
            while not pool.allocate(job, job.done + tokens):
                victim = pool.running.pop()
                pool.preempt(victim)
                preempted = True
                if victim is job:
                    break
            else:
                works.append(Work(job, tokens))
                budget -= tokens
                place += 1
                continue
            break
        while not preempted and pool.waiting and budget and len(pool.running) < pool.slots:
            job = pool.waiting[0]
            # The whole prompt must find room, although only a chunk of it is given blocks now.
            if pool.needed(job, job.total) > pool.free:
                break
            tokens = min(job.left, budget)
            pool.allocate(job, tokens)
            pool.running.append(pool.waiting.popleft())
            works.append(Work(job, tokens))
            budget -= tokens
        return Batch(works)

    def proposals(self, job: Job) -> int:
        """How many are verified of a request that decodes."""
        return 0

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Finished requests leave."""
        pool.running = [job for job in pool.running if job.produced < job.output]
