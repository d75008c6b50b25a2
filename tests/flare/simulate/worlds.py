"""Small costs and loads for the tests of the simulator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from flare.graphs.sim.costs import CostTable, Curve, Surface
from flare.simulate.iteration import Batch, Job, Pool, Rule
from flare.simulate.outcome import Outcome
from flare.simulate.traces import TraceRequest

TABLE = {
    "decode": {"1": 5.0, "64": 20.0},
    "prefill": {"64": 6.0, "1024": 50.0},
    "mixed": {"1": {"64": 7.0, "1024": 51.0}, "64": {"64": 22.0, "1024": 66.0}},
    "kv_bytes_per_token": 100_000,
}


def costs_file(folder: Path) -> Path:
    """A table of costs."""
    path = folder / "costs.json"
    path.write_text(json.dumps(TABLE), encoding="utf-8")
    return path


def flat_costs(ms: float = 10.0) -> CostTable:
    """Every iteration takes the same time; prompts profile at a millisecond for each 100 tokens."""
    same = Surface({0.0: Curve({0.0: ms})})
    return CostTable("flat", 0, 1024.0, same, Curve({0.0: 0.0, 100.0: 1.0}), Surface({0.0: Curve({0.0: 0.0})}), same)


def request(arrival_s: float = 0.0, prompt: int = 8, output: int = 4, client: str = "") -> TraceRequest:
    """A request of a trace."""
    return TraceRequest(arrival_s, prompt, output, client)


class Bench:
    """Steps a rule by hand: what it schedules is done at once, and no proposal is right."""

    def __init__(self, rule: Rule, *, slots: int = 4, blocks: int = 1000, costs: CostTable | None = None) -> None:
        self.rule = rule
        self.pool = Pool(slots, blocks, rule.block, costs or flat_costs())
        self.jobs: list[Job] = []
        self.now_ms = 0.0

    def arrive(self, *requests: TraceRequest) -> list[Job]:
        """Requests come, in this order."""
        jobs = [Job(len(self.jobs) + place, Outcome(request)) for place, request in enumerate(requests)]
        self.jobs.extend(jobs)
        for job in jobs:
            self.rule.arrive(job, self.pool)
        return jobs

    def step(self, took_ms: float = 10.0) -> list[tuple[int, int]]:
        """One iteration: (index of the request, tokens) of each work, in order."""
        batch: Batch = self.rule.schedule(self.pool, self.now_ms)
        works = [(job.index, tokens) for job, tokens in batch.works]
        for job, tokens in batch.works:
            assert tokens > 0 and (job.decoding or tokens <= job.left)
            job.done += 1 if job.decoding else tokens
            if job.done == job.total:
                job.produced += 1
                if job.produced == job.output:
                    self.pool.release(job)
        self.now_ms += took_ms
        self.rule.ran(batch, self.pool, self.now_ms, took_ms)
        assert self.pool.used == sum(job.blocks for job in self.jobs) <= self.pool.capacity
        return works

    def steps(self, count: int) -> list[list[tuple[int, int]]]:
        """Several iterations."""
        return [self.step() for _ in range(count)]


def total_tokens(outcomes: Iterable[Outcome]) -> int:
    """Output tokens of all."""
    return sum(len(outcome.tokens) for outcome in outcomes)


def tokens_of(works: Sequence[tuple[int, int]]) -> int:
    """Tokens of an iteration."""
    return sum(tokens for _, tokens in works)
