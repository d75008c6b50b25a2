"""One server that works in iterations, as most do: a rule picks the batch, the table of costs says how long it takes.

Owns virtual time, slots and KV blocks of the rules that Flare is compared with. Does not own what a batch holds (the
rules do). Surprising rule: a batch costs what the table says for exactly its tokens, unpadded, which no server of
captured graphs attains; the comparison leans to the rules' side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flare.graphs.sim.acceptance import Acceptance
from flare.graphs.sim.costs import NS_PER_MS, CostTable

from .arrivals import Arrivals
from .outcome import OnProgress, Outcome
from .speculation import NO_PROPOSER, request_key

_REPORT_EVERY = 256


@dataclass(slots=True, eq=False)
class Job:
    """A request in the server. `done` of its `total` tokens are in the KV cache. `key` is what `Acceptance` knows it
    by."""

    index: int
    outcome: Outcome
    key: int = 0
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
    """`tokens` more tokens of one request in the next iteration; of one that decodes, its target positions: the pending
    token and the proposals that are verified."""

    job: Job
    tokens: int


class Batch(NamedTuple):
    """One iteration; `extra_ms` is time beside the graph, such as for swapping. `proposals` are made for each decoding
    row, one after the other, verified or not."""

    works: Sequence[Work]
    extra_ms: float = 0.0
    proposals: int = 0


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
    arrivals: Arrivals,
    costs: CostTable,
    *,
    slots: int,
    kv_tokens: int,
    jitter: Callable[[int], float] = lambda _iteration: 1.0,
    acceptance: Acceptance = NO_PROPOSER.acceptance,
    until_ns: int | None = None,
    progress: OnProgress = lambda _share: None,
) -> list[Outcome]:
    """Serve what arrives by `rule`; what became of each request.

    `jitter` gives the factor on the duration of each iteration, numbered from 1. `until_ns` ends the run early. Raises
    RuntimeError if the rule leaves requests standing for ever.
    """
    pool = Pool(slots, kv_tokens // rule.block, rule.block, costs)
    now_ns = iteration = 0
    while until_ns is None or now_ns < until_ns:
        for place, outcome in arrivals.take(now_ns):
            job = Job(place, outcome)
            if pool.needed(job, job.prompt + job.output) > pool.capacity:
                outcome.refused = True
                arrivals.ended(now_ns, outcome)
                continue
            job.key = request_key(outcome.request)
            rule.arrive(job, pool)
        batch = rule.schedule(pool, now_ns / NS_PER_MS)
        if batch.works:
            iteration += 1
            took_ms = (duration_ms(costs, batch) * jitter(iteration)) + batch.extra_ms
            now_ns += max(1, round(took_ms * NS_PER_MS))
            for job, tokens in batch.works:
                _advance(job, tokens, acceptance, now_ns)
                if job.produced == job.output:
                    pool.release(job)
                    arrivals.ended(now_ns, job.outcome)
            rule.ran(batch, pool, now_ns / NS_PER_MS, took_ms)
        elif (arrival_ns := arrivals.next_ns()) is not None:
            now_ns = arrival_ns
        elif all(outcome.finished or outcome.refused for outcome in arrivals.outcomes):
            break
        else:
            raise RuntimeError("the rule runs nothing, and requests are left")
        if iteration % _REPORT_EVERY == 0:
            progress(arrivals.share(now_ns))
    return arrivals.outcomes


def duration_ms(costs: CostTable, batch: Batch) -> float:
    """The time of a batch: decoding rows at their mean context and width beside all prompt tokens (docs/simulation.md,
    "Costs")."""
    rows = context = targets = tokens = 0
    chunks = []
    for job, count in batch.works:
        if job.decoding:
            rows += 1
            context += job.done
            targets += count
        else:
            tokens += count
            chunks.append((count, job.done))
    if not rows:
        return costs.mixed(0, 0.0, tokens, chunks)
    plain = costs.mixed(rows, context / rows, tokens, chunks)
    return plain + costs.speculation(rows, targets / rows, batch.proposals)


def _advance(job: Job, tokens: int, acceptance: Acceptance, now_ns: int) -> None:
    """Count in what an iteration did for a request: prompt tokens or, where it decodes, what was accepted and one
    more."""
    if job.decoding:
        drawn = 1 + (acceptance(job.key, job.produced - 1, tokens - 1) if tokens > 1 else 0)
        job.done += drawn
    else:
        job.done += tokens
        fresh = min(job.done, job.prompt) - job.prompt_seen
        if fresh > 0:
            job.prompt_seen += fresh
            job.outcome.prompts.append((now_ns, fresh))
        drawn = 1 if job.done == job.total else 0
    job.produced += drawn
    job.outcome.tokens.extend([now_ns] * drawn)
