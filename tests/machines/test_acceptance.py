"""Acceptance estimates: the given values, censoring, the prior, and what selection reads of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.acceptance import PRIOR_STEP, START_WEIGHT, WEIGHT_MAX, Acceptance, Prior, observations

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())


def prior_of(*means: float) -> Prior:
    prior = Prior(len(means))
    prior.means = list(means)
    return prior


@pytest.mark.parametrize("case", range(len(VECTORS["acceptance"])))
def test_given_values(case: int) -> None:
    vector = VECTORS["acceptance"][case]
    acceptance, tokens = Acceptance(prior_of(vector["start_mean"]), 1.0), 0
    for step in vector["steps"]:
        tokens += step["tokens_since"]
        assert acceptance.optimistic(acceptance.weights(tokens))[0] == pytest.approx(
            step["expect_optimistic_before"], rel=1e-12
        )
        acceptance.observe((float(step["observe"]),), tokens)
        assert acceptance.mean(0) == pytest.approx(step["expect_mean"], rel=1e-12)
        assert acceptance.weight(0, tokens) == pytest.approx(step["expect_weight"], rel=1e-12)


@pytest.mark.parametrize("case", range(len(VECTORS["expected_tokens"])))
def test_given_yields(case: int) -> None:
    """Survival as selection reads it, with the exponent, gives the yields that were worked out elsewhere."""
    vector = VECTORS["expected_tokens"][case]
    acceptance = Acceptance(prior_of(*vector["survival"]), vector["alpha"])
    width = min(vector["width"], vector["tokens_left"])
    assert 1.0 + sum(acceptance.scored_survival[: width - 1]) == pytest.approx(vector["expect"], rel=1e-12)


@pytest.mark.parametrize(
    ("width", "committed", "ended", "seen"),
    [
        (1, 1, False, ()),
        (4, 1, False, (0.0, 0.0, 0.0)),
        (4, 2, False, (1.0, 0.0, 0.0)),
        (4, 4, False, (1.0, 1.0, 1.0)),
        (4, 2, True, (1.0,)),
        (4, 1, True, ()),
        (4, 4, True, (1.0, 1.0, 1.0)),
    ],
)
def test_a_rejection_is_seen_by_every_longer_prefix_and_an_end_by_none(
    width: int, committed: int, ended: bool, seen: tuple[float, ...]
) -> None:
    assert observations(width, committed, ended=ended) == seen


def test_depths_that_were_not_offered_keep_their_estimates() -> None:
    acceptance = Acceptance(Prior(3), 1.0)
    acceptance.observe((1.0,), 1)
    weight = START_WEIGHT * 2 ** (-1 / 128)
    first = pytest.approx((weight * 0.5 + 1) / (weight + 1))
    assert [acceptance.mean(depth) for depth in range(3)] == [first, 0.25, 0.125]
    assert acceptance.weight(1, 1) == pytest.approx(START_WEIGHT * 2 ** (-1 / 128))


def test_the_prior_moves_a_sixty_fourth_of_the_way_and_newcomers_start_from_it() -> None:
    prior = Prior(2)
    early = Acceptance(prior, 1.0)
    prior.observe((1.0, 0.0))
    assert prior.means == [0.5 + 0.5 * PRIOR_STEP, 0.25 - 0.25 * PRIOR_STEP]
    assert early.survival == (0.5, 0.25)
    assert Acceptance(prior, 1.0).survival == tuple(prior.means)


rounds = st.lists(st.tuples(st.integers(2, 6), st.integers(1, 6), st.booleans(), st.integers(0, 500)), max_size=40)


@given(rounds, st.sampled_from((0.5, 1.0, 2.0)))
def test_survival_never_rises_and_stays_a_probability(attempts: list[tuple[int, int, bool, int]], alpha: float) -> None:
    """Means within what was observed, weights within their cap, whatever rounds come."""
    acceptance, tokens = Acceptance(Prior(5), alpha), 0
    for width, committed, ended, idle in attempts:
        tokens += min(width, committed) + idle
        acceptance.observe(observations(width, min(width, committed), ended=ended), tokens)
        assert all(0.0 < mean <= 1.0 for mean in acceptance.survival)
        for survival in (
            acceptance.survival,
            acceptance.scored_survival,
            acceptance.optimistic(acceptance.weights(tokens)),
        ):
            assert all(a >= b for a, b in itertools.pairwise(survival))
        assert acceptance.scored_survival == pytest.approx([mean**alpha for mean in acceptance.survival])
        assert all(acceptance.weight(depth, tokens) <= WEIGHT_MAX for depth in range(5))
        pairs = zip(acceptance.optimistic(acceptance.weights(tokens)), acceptance.survival, strict=True)
        assert all(bound >= mean for bound, mean in pairs)


def test_steady_acceptance_is_learned() -> None:
    acceptance = Acceptance(Prior(1), 1.0)
    for index in range(400):
        acceptance.observe((float(index % 4 != 0),), 2 * index)
    assert math.isclose(acceptance.survival[0], 0.75, abs_tol=0.02)


@pytest.mark.parametrize(
    ("ended", "known", "seen"),
    [
        (False, (), (1.0, 0.0, 0.0)),
        (False, (0.9,), (0.9, 0.0, 0.0)),
        (False, (0.9, 0.5, 0.1), (0.9, 0.5, 0.1)),
        (True, (0.9, 0.5, 0.1), (0.9,)),
        (True, (), (1.0,)),
    ],
)
def test_known_probabilities_take_the_place_of_what_came_of_them(
    ended: bool, known: tuple[float, ...], seen: tuple[float, ...]
) -> None:
    assert observations(4, 2, ended=ended, survival=known) == seen


def test_the_bound_is_raised_with_everything_that_is_scored() -> None:
    acceptance = Acceptance(prior_of(0.25, 0.04), 0.5)
    assert acceptance.scored((0.25, 0.04)) == acceptance.scored_survival == (0.5, 0.2)
