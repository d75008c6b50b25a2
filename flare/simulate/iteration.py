"""One server that works in iterations, as most do: a rule picks the batch, the table of costs says how long it takes.

Owns virtual time, slots and KV blocks of the rules that Flare is compared with. Does not own what a batch holds (the
rules do). Surprising rule: a batch costs what the table says for exactly its tokens, unpadded, which no server of
captured graphs attains; the comparison leans to the rules' side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flare.graphs.sim.costs import NS_PER_MS, CostTable

from .outcome import OnProgress, Outcome
from .traces import TraceRequest

_REPORT_EVERY = 256


@dataclass(slots=True, eq=False)
class Job:
    """A request in the server. `done` of its `total` tokens are in the KV cache."""

    index: int
    outcome: Outcome
    done: int = 0
    produced: int = 0
    blocks: int = 0
    prompt_seen: int = 0

    @property
    def prompt(self) -> int:
        """Prompt tokens."""
        return self.outcome.request.prompt_tokens

    @property
    def output(self) -> int:
        """Output tokens at most, which are also those that it will have."""
        return self.outcome.request.output_tokens

    @property
    def client(self) -> str:
        """Whose it is."""
        return self.outcome.request.client

    @property
    def total(self) -> int:
        """Tokens that are known: the prompt and what was produced."""
        return self.prompt + self.produced

    @property
    def left(self) -> int:
        """Tokens to compute before the next output token: 1 while decoding."""
        return self.total - self.done

    @property
    def decoding(self) -> bool:
        """Whether its next step is a decode step."""
        return self.produced > 0 and self.left == 1


class Work(NamedTuple):
    """`tokens` more tokens of one request in the next iteration."""

    job: Job
    tokens: int


class Batch(NamedTuple):
    """One iteration; `extra_ms` is time beside the graph, such as for swapping."""

    works: Sequence[Work]
    extra_ms: float = 0.0


@dataclass(slots=True)
class Pool:
    """What the rules share: request slots and a KV cache of `capacity` blocks of `block` tokens."""

    slots: int
    capacity: int
    block: int
    costs: CostTable
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    used: int = 0

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.capacity - self.used

    def needed(self, job: Job, tokens: int) -> int:
        """Further blocks with which `job` holds `tokens` tokens."""
        return max(0, -(-tokens // self.block) - job.blocks)

    def allocate(self, job: Job, tokens: int) -> bool:
        """Give it blocks for `tokens` tokens in all; False, and nothing, if there are not so many."""
        needed = self.needed(job, tokens)
        if needed > self.free:
            return False
        job.blocks += needed
        self.used += needed
        return True

    def release(self, job: Job) -> None:
        """Take all its blocks."""
        self.used -= job.blocks
        job.blocks = 0

    def preempt(self, job: Job) -> None:
        """Drop its cache; it computes everything anew when its turn comes, which is first among those that wait."""
        self.release(job)
        job.done = 0
        self.waiting.appendleft(job)


class Rule(Protocol):
    """A server's way to choose the next batch. It moves jobs between `waiting` and `running` itself."""

    block: int
    """Tokens of a KV block."""

    def arrive(self, job: Job, pool: Pool) -> None:
        """A request has come."""
        ...

    def schedule(self, pool: Pool, now_ms: float) -> Batch:
        """The next iteration; without works, nothing can run before the next arrival."""
        ...

    def ran(self, batch: Batch, pool: Pool, now_ms: float, took_ms: float) -> None:
        """The iteration has ended; jobs of it that have all their tokens are finished, and their blocks are free."""
        ...


def simulate(
    rule: Rule,
    requests: Iterable[TraceRequest],
    costs: CostTable,
    *,
    slots: int,
    kv_tokens: int,
    jitter: Callable[[int], float] = lambda _iteration: 1.0,
    until_ns: int | None = None,
    progress: OnProgress = lambda _share: None,
) -> list[Outcome]:
    """Serve `requests` (in order of arrival) by `rule`; what became of each.

    `jitter` gives the factor on the duration of each iteration, numbered from 1. `until_ns` ends the run early. Raises
    RuntimeError if the rule leaves requests standing for ever.
    """
    pool = Pool(slots, kv_tokens // rule.block, rule.block, costs)
    outcomes = [Outcome(request) for request in requests]
    now_ns = iteration = place = 0
    while until_ns is None or now_ns < until_ns:
        while place < len(outcomes) and outcomes[place].arrival_ns <= now_ns:
            outcome, job = outcomes[place], Job(place, outcomes[place])
            place += 1
            if pool.needed(job, job.prompt + job.output) > pool.capacity:
                outcome.refused = True
            else:
                rule.arrive(job, pool)
        batch = rule.schedule(pool, now_ns / NS_PER_MS)
        if batch.works:
            iteration += 1
            took_ms = (duration_ms(costs, batch.works) * jitter(iteration)) + batch.extra_ms
            now_ns += max(1, round(took_ms * NS_PER_MS))
            _advance(batch, pool, now_ns)
            rule.ran(batch, pool, now_ns / NS_PER_MS, took_ms)
        elif place < len(outcomes):
            now_ns = outcomes[place].arrival_ns
        elif all(outcome.finished or outcome.refused for outcome in outcomes):
            break
        else:
            raise RuntimeError("the rule runs nothing, and requests are left")
        if iteration % _REPORT_EVERY == 0:
            progress(place / len(outcomes))
    return outcomes


def duration_ms(costs: CostTable, works: Iterable[Work]) -> float:
    """The time of a batch: decoding rows at their mean context beside all prompt tokens (docs/simulation.md,
    "Costs")."""
    rows = context = tokens = 0
    chunks = []
    for job, count in works:
        if job.decoding:
            rows += 1
            context += job.done
        else:
            tokens += count
            chunks.append((count, job.done))
    return costs.mixed(rows, context / rows if rows else 0.0, tokens, chunks)


def _advance(batch: Batch, pool: Pool, now_ns: int) -> None:
    for job, tokens in batch.works:
        job.done += tokens
        fresh = min(job.done, job.prompt) - job.prompt_seen
        if fresh > 0:
            job.prompt_seen += fresh
            job.outcome.prompts.append((now_ns, fresh))
        if job.done == job.total:
            job.produced += 1
            job.outcome.tokens.append(now_ns)
            if job.produced == job.output:
                pool.release(job)
