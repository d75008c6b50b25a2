"""Rounds of the compiled program."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from flare.graphs.frames import Sampling
from tests.graphs.dense_head import guesses
from tests.graphs.drafts import random_head
from tests.graphs.exact_rounds import CONFIG, SOURCE, ExactRounds, head, ids
from tests.graphs.programs_driver import GREEDY, Driver, native
from tests.graphs.rounds import Row, confidence, finish, proposals, step
from tests.graphs.rounds_distribution import RoundDistribution


class TestNativeRounds(ExactRounds):
    """Exact."""

    make = partial(native, threads=1)


class TestNativeDistribution(RoundDistribution):
    """Many tokens."""

    make = partial(native, threads=1)
    tokens = 20_000


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=9)], ids=["greedy", "sampled"])
def test_a_head_guesses_as_it_is_defined_but_for_its_bytes(sampling: Sampling) -> None:
    driver, row = Driver(native, CONFIG, SOURCE, draft=head(), width=8), Row(ids(19, 11), sampling, limit=90)
    row.begin(driver, 2, chunk=6)
    clear = 0
    while len(row.tokens) < 60:
        expected = guesses(head(), CONFIG, SOURCE, [*row.prompt, *row.tokens], 3, sampling)
        step(driver, [row], [4])
        (made,), said = proposals(driver, [4]), confidence(driver)[0, 2].tolist()
        for token, likely, guess in zip(made, said, expected, strict=False):
            if guess.margin > 0.01:
                assert (token, likely) == (guess.token, pytest.approx(guess.probability, abs=0.01))
                clear += 1
            elif token != guess.token:
                break
    assert clear > 60


def test_a_head_may_keep_any_number_of_tokens(tmp_path: Path) -> None:
    odd, sampling = random_head(tmp_path, CONFIG, SOURCE, kept=37), Sampling(temperature=0.8, seed=9)
    driver, row = Driver(native, CONFIG, SOURCE, draft=odd, width=4), Row(ids(19, 12), sampling, limit=90)
    row.begin(driver, 0)
    agreed = 0
    for _ in range(40):
        expected = guesses(odd, CONFIG, SOURCE, [*row.prompt, *row.tokens], 1, sampling)[0]
        step(driver, [row], [2])
        agreed += proposals(driver, [2]) == [[expected.token]]
    assert agreed >= 36


def test_threads_change_nothing() -> None:
    rows = [Row(ids(9 + i, 90 + i), Sampling(seed=i)) for i in range(4)]
    both = []
    for threads in (1, 2):
        driver = Driver(partial(native, threads=threads), CONFIG, SOURCE, draft=head(), width=4)
        served = [row.fresh() for row in rows]
        for slot, row in enumerate(served):
            row.begin(driver, slot)
        finish(driver, served, 4)
        both.append([row.tokens for row in served])
    assert both[0] == both[1]
