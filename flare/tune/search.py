"""The search: policies drawn in generations, each simulated, the better ones shaping the next.

Owns the order of policies and the loop around the optimizer (CMA-ES: Hansen, "The CMA Evolution Strategy: A Tutorial",
arXiv:1604.00772). Does not own axes (`space`) or simulation. Surprising rule: a generation has the same size on any
number of cores, and the optimizer hears of it in the order drawn, so that a seed gives the same outcome everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
from cmaes import CMA

from flare.config.schema import Policy
from flare.simulate.cells import Cell, Result
from flare.simulate.pool import OnShare, run_cells

from .preset import toml
from .space import AXES, point_of, policy_at

_SPREAD = 0.2
"""Standard deviation of the first generation, as a share of each axis."""

Evaluate = Callable[[Sequence[Policy], OnShare], list[tuple[Result, ...]]]
"""Simulates policies on every load; for each policy a result for each load."""


class Score(NamedTuple):
    """How a policy did, as averages over the loads: the share of good requests; ties go to the higher output rate
    (tokens/s), then to the earlier median first token (ms)."""

    good: float
    output_tokens_per_s: float
    ttft_ms: float

    @property
    def order(self) -> tuple[float, float, float]:
        """Sorts better scores first."""
        return -self.good, -self.output_tokens_per_s, self.ttft_ms


class Trial(NamedTuple):
    """A policy that was simulated; `results` has one entry for each load."""

    policy: Policy
    results: tuple[Result, ...]
    score: Score


def search(base: Policy, evaluate: Evaluate, *, trials: int, seed: int, progress: OnShare) -> list[Trial]:
    """Simulate `trials` policies around `base`, which is the first of them; all in the order in which they were drawn.

    `progress` is called with the number of policies that are done. Raises what `evaluate` raises.
    """
    bounds = np.array([[0.0, 1.0]] * len(AXES))
    optimizer = CMA(point_of(base), _SPREAD, bounds=bounds, seed=seed)
    done: list[Trial] = []
    while True:
        points = [optimizer.ask() for _ in range(optimizer.population_size)]
        policies = [policy_at(point, base) for point in points]
        # The base is no child of the distribution; it runs with the first generation to keep the cores busy.
        drawn = policies if done else [base, *policies]
        drawn = drawn[: trials - len(done)]
        before = len(done)
        found = evaluate(drawn, partial(_behind, progress, before))
        done += [Trial(policy, results, score(results)) for policy, results in zip(drawn, found, strict=True)]
        if len(done) == trials:
            return done
        # The optimizer uses ranks alone, so ranks are all that it is told.
        orders = [trial.score.order for trial in done[-len(points) :]]
        ranks = np.argsort(sorted(range(len(points)), key=orders.__getitem__))
        optimizer.tell([(point, float(rank)) for point, rank in zip(points, ranks, strict=True)])


def _behind(progress: OnShare, before: int, share: float) -> None:
    progress(before + share)


def score(results: Sequence[Result]) -> Score:
    """The averages over the loads, of which there is at least one."""
    figures = [result.figures for result in results]
    firsts = [math.inf if each.ttft_p50 is None else each.ttft_p50 for each in figures]
    rates = [each.output_tokens_per_s for each in figures]
    return Score(*(math.fsum(values) / len(figures) for values in ([each.good for each in figures], rates, firsts)))


def best(trials: Sequence[Trial]) -> Trial:
    """The best of the trials, the first of equals."""
    return min(trials, key=lambda trial: trial.score.order)


def simulated(loads: Sequence[Cell], jobs: int) -> Evaluate:
    """An `Evaluate` that runs `loads`, whose `policy` is replaced, in at most `jobs` processes."""

    def evaluate(policies: Sequence[Policy], progress: OnShare) -> list[tuple[Result, ...]]:
        with TemporaryDirectory() as folder:
            cells = []
            for number, policy in enumerate(policies):
                path = Path(folder, f"{number}.toml")
                path.write_text(toml(policy), encoding="utf-8")
                cells += [msgspec.structs.replace(load, policy=str(path)) for load in loads]
            found = run_cells(cells, jobs, None, lambda share: progress(share / len(loads)))
        return [tuple(found[start : start + len(loads)]) for start in range(0, len(found), len(loads))]

    return evaluate
