"""The search on objectives that need no simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from flare.config.loader import load_policy
from flare.config.schema import Policy
from flare.simulate.cells import Cell, Result
from flare.simulate.figures import Figures, Slo, measure
from flare.simulate.outcome import Outcome
from flare.simulate.pool import OnShare
from flare.tune.search import Evaluate, Score, Trial, best, score, search
from flare.tune.space import point_of
from tests.flare.simulate.worlds import request

BASE = load_policy("balanced")
TARGET = point_of(load_policy("interactive"))
NOTHING = measure([Outcome(request())], Slo(), 1.0)


def result(good: float, rate: float = 1.0, ttft: float | None = 1.0) -> Result:
    figures: Figures = msgspec.structs.replace(NOTHING, good=good, output_tokens_per_s=rate, ttft_p50=ttft)
    return Result("", Cell(policy="", trace="", costs=""), figures, 1.0)


def closeness(policy: Policy) -> float:
    """Greater the nearer a policy lies to the target."""
    return -float(np.square(point_of(policy) - TARGET).sum())


def evaluating(objective: Callable[[Policy], float], sizes: list[int] | None = None) -> Evaluate:
    def evaluate(policies: Sequence[Policy], progress: OnShare) -> list[tuple[Result, ...]]:
        if sizes is not None:
            sizes.append(len(policies))
        progress(len(policies))
        return [(result(objective(policy)),) for policy in policies]

    return evaluate


def run(objective: Callable[[Policy], float], trials: int, seed: int = 0) -> list[Trial]:
    return search(BASE, evaluating(objective), trials=trials, seed=seed, progress=lambda _done: None)


def test_the_base_is_first_and_as_many_are_run_as_were_asked_for() -> None:
    sizes, shares = list[int](), list[float]()
    found = search(BASE, evaluating(closeness, sizes), trials=30, seed=0, progress=shares.append)
    assert found[0].policy == BASE and len(found) == sum(sizes) == 30
    assert sizes == [12, 11, 7] and shares[-1] == 30
    assert all(earlier < later for earlier, later in pairwise(shares))
    assert [len(run(closeness, count)) for count in (2, 12, 13)] == [2, 12, 13]


@pytest.mark.parametrize("seed", range(3))
def test_it_comes_nearer_to_what_is_better(seed: int) -> None:
    found = run(closeness, 300, seed)
    generations = [max(trial.score.good for trial in found[start : start + 50]) for start in (0, 250)]
    assert closeness(BASE) < generations[0] < generations[1]
    assert -best(found).score.good < 0.3 * -closeness(BASE)


def test_a_seed_gives_one_outcome() -> None:
    assert run(closeness, 40, 5) == run(closeness, 40, 5)
    assert run(closeness, 40, 5)[1:] != run(closeness, 40, 6)[1:]


def test_only_ranks_count() -> None:
    bent = [trial.policy for trial in run(lambda policy: math.exp(closeness(policy)), 60)]
    assert bent == [trial.policy for trial in run(closeness, 60)]
    assert bent != [trial.policy for trial in run(lambda policy: -closeness(policy), 60)]


def test_ties_go_to_the_output_rate_and_then_to_the_first_token() -> None:
    rows = [(0.8, 9.0, 1.0), (0.9, 5.0, 1.0), (0.9, 6.0, 3.0), (0.9, 6.0, 2.0), (0.9, 6.0, 2.0)]
    trials = [Trial(BASE, (), Score(*row)) for row in rows]
    assert best(trials) is trials[3]


def test_a_score_is_the_average_over_loads() -> None:
    assert score([result(0.5, 10, 100), result(1.0, 30, 300)]) == Score(0.75, 20, 200)
    assert score([result(0.0, 0, None), result(1.0, 30, 300)]).ttft_ms == math.inf
