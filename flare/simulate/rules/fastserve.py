"""FastServe: a multi-level feedback queue over iterations, so that short answers pass long ones (arXiv:2305.05920).

Owns the rule of its scheduler: levels with doubling quanta, entered at the level that the prompt's own time fits
(skip-join), demotion, and promotion of the starved. Surprising rule: preemption keeps the KV cache; where it does not
fit, the least urgent is swapped to the host's memory, which is not limited here, at the speed of a PCIe link. That
takes more requests with a cache than fit into a batch; how many there may be is this rule's parameter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..iteration import Batch, Job, Pool, Work

_QUANTUM_MS = 10.0
_PROMPT_TOKENS_MAX = 2_048
_STARVATION_EVERY = 1_000
_STARVED_MS = 3_000.0
_LINK_BYTES_PER_MS = 25e6


@dataclass(slots=True)
class _Level:
    """Requests that have run come before those that have not: they are put back in front."""

    begun: deque[Job] = field(default_factory=deque)
    fresh: deque[Job] = field(default_factory=deque)


@dataclass(slots=True)
class _Standing:
    level: int
    last_ms: float
    ran_ms: float = 0.0
    swapped: int = 0


class FastServeRule:
    """The largest batch is the number of slots; at most `resident` requests (None: as many as slots) have begun and are
    not finished."""

    block = 16

    def __init__(self, resident: int | None = None) -> None:
        self._resident = resident
        self._begun = 0
        self._levels: list[_Level] = []
        self._standings: dict[int, _Standing] = {}
        self._iterations = 0

    def arrive(self, job: Job, pool: Pool) -> None:
        """At the end of the first level whose quantum its prompt fits."""
        level, prefill_ms = 0, pool.costs.prefill(job.prompt)
        while _QUANTUM_MS * 2**level < prefill_ms:
            level += 1
        self._standings[job.index] = _Standing(level, job.outcome.arrival_ns / 1e6)
        self._level(level).fresh.append(job)

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """The most urgent requests, prompts and decodes in one batch."""
        self._iterations += 1
        if self._iterations % _STARVATION_EVERY == 0:
            self._promote(now_ms)
        works = self._pick(pool)
        kept, moved = self._place(works, pool)
        for job, _ in reversed(works[len(kept) :]):
            level = self._level(self._standings[job.index].level)
            (level.begun if job.done else level.fresh).appendleft(job)
        self._begun += sum(job.done == 0 for job, _ in kept)
        return Batch(kept, moved * pool.costs.kv_bytes_per_token / _LINK_BYTES_PER_MS)

    def _pick(self, pool: Pool) -> list[Work]:
        """Taken off their levels, most urgent first, up to the first prompt that does not fit."""
        works: list[Work] = []
        prompts, free = 0, (pool.slots if self._resident is None else self._resident) - self._begun
        for level in self._levels:
            while level.begun and len(works) < pool.slots:
                works.append(Work(level.begun[0], level.begun.popleft().left))
            while level.fresh and free > 0:
                job = level.fresh[0]
                if len(works) == pool.slots or (prompts and prompts + job.prompt > _PROMPT_TOKENS_MAX):
                    return works
                prompts += job.prompt
                free -= 1
                works.append(Work(level.fresh.popleft(), job.left))
        return works

    def _place(self, works: list[Work], pool: Pool) -> tuple[list[Work], int]:
        """The works whose caches fit, most urgent first, and how many tokens were moved to make them fit."""
        moved = 0
        idle = [job for level in self._levels for job in level.begun if job.blocks]
        for count, (job, _) in enumerate(works):
            while not pool.allocate(job, job.total):
                behind = [work.job for work in works[count + 1 :] if work.job.blocks]
                victim = idle.pop() if idle else behind[-1] if behind else None
                if victim is None:
                    return works[:count], moved
                moved += victim.done
                self._standings[victim.index].swapped = victim.done
                pool.release(victim)
            moved += self._standings[job.index].swapped
            self._standings[job.index].swapped = 0
        return works, moved

    def _promote(self, now_ms: float) -> None:
        """Who has not run for long starts again at the top."""
        top = self._level(0)
        for level in self._levels[1:]:
            for queue, above in ((level.begun, top.begun), (level.fresh, top.fresh)):
                jobs = list(queue)
                queue.clear()
                for job in jobs:
                    standing = self._standings[job.index]
                    starved = now_ms - standing.last_ms >= _STARVED_MS
                    (above if starved else queue).append(job)
                    if starved:
                        standing.level, standing.ran_ms = 0, 0.0

    def _level(self, level: int) -> _Level:
        while len(self._levels) <= level:
            self._levels.append(_Level())
        return self._levels[level]

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """Whoever has used its quantum goes down a level; all go to the front of theirs, in their order."""
        for job, _ in reversed(batch.works):
            if job.produced == job.output:
                self._begun -= 1
                del self._standings[job.index]
                continue
            standing = self._standings[job.index]
            standing.last_ms = now_ms
            standing.ran_ms += took_ms
            if standing.ran_ms > _QUANTUM_MS * 2**standing.level:
                standing.level += 1
                standing.ran_ms = 0.0
            self._level(standing.level).begun.appendleft(job)
