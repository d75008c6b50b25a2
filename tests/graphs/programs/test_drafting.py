"""Rounds of the torch program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from flare.graphs.frames import Sampling
from tests.graphs.dense_head import guesses
from tests.graphs.exact_rounds import CONFIG, SOURCE, ExactRounds, head, ids
from tests.graphs.programs_driver import GREEDY, Driver, reference
from tests.graphs.rounds import Row, confidence, proposals, step
from tests.graphs.rounds_distribution import RoundDistribution


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from more, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestReferenceRounds(ExactRounds):
    """Exact."""

    make = staticmethod(reference)


class TestReferenceDistribution(RoundDistribution):
    """Few tokens: it is slow."""

    make = staticmethod(reference)
    tokens = 1000


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=9)], ids=["greedy", "sampled"])
def test_a_head_guesses_as_it_is_defined(sampling: Sampling) -> None:
    driver, row = Driver(reference, CONFIG, SOURCE, draft=head(), width=8), Row(ids(19, 11), sampling, limit=60)
    row.begin(driver, 2, chunk=6)
    for width in (4, 8, 1, 1, 5, 2, 8):
        expected = guesses(head(), CONFIG, SOURCE, [*row.prompt, *row.tokens], width - 1, sampling)
        step(driver, [row], [width])
        assert proposals(driver, [width]) == [[guess.token for guess in expected]]
        conditional, joint = confidence(driver)[:, 2, : width - 1].tolist()
        assert conditional == pytest.approx([guess.probability for guess in expected], abs=1e-4)
        assert joint == pytest.approx(list(itertools.accumulate(conditional, lambda a, b: a * b)), abs=1e-6)
