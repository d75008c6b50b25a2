"""Acceptance: pure, within what is offered, and at the rate that was asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.graphs.sim.acceptance import FixedAcceptance, RandomAcceptance

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 9), KEYS, st.integers(0, 1000), st.integers(0, 7))
def test_a_fixed_number_is_cut_to_what_is_offered(accepted: int, key: int, index: int, drafts: int) -> None:
    assert FixedAcceptance(accepted)(key, index, drafts) == min(accepted, drafts)


@given(st.integers(0, 2**64 - 1), KEYS, st.integers(0, 1000))
def test_a_narrower_round_accepts_the_same_as_far_as_it_goes(seed: int, key: int, index: int) -> None:
    acceptance = RandomAcceptance(seed, mean=0.6, spread=0.4)
    widest = acceptance(key, index, 7)
    assert [acceptance(key, index, drafts) for drafts in range(8)] == [min(widest, drafts) for drafts in range(8)]


@pytest.mark.parametrize("mean", [0.0, 0.3, 0.8, 1.0])
def test_each_proposal_is_accepted_with_the_probability(mean: float) -> None:
    acceptance = RandomAcceptance(7, mean)
    counts = Counter(acceptance(key, index, 3) for key in range(50) for index in range(100))
    for depth in range(1, 4):
        survived = sum(count for accepted, count in counts.items() if accepted >= depth) / 5000
        assert survived == pytest.approx(mean**depth, abs=0.03)


@given(KEYS, st.integers(0, 1000))
def test_a_position_fares_alike_wherever_a_round_begins(key: int, index: int) -> None:
    acceptance = RandomAcceptance(5, mean=0.6, spread=0.4)
    accepted = acceptance(key, index, 7)
    assert [acceptance(key, index + begun, 7 - begun) for begun in range(accepted)] == [
        accepted - begun for begun in range(accepted)
    ]


@pytest.mark.parametrize("insight", [0.0, 0.4, 1.0])
def test_confidence_is_calibrated_and_sees_as_much_as_is_asked_for(insight: float) -> None:
    process = RandomAcceptance(7, mean=0.7, insight=insight)
    right: dict[float, list[int]] = {}
    for key in range(50):
        for index in range(100):
            (belief,) = process.confidence(key, index, 1)
            right.setdefault(round(belief, 6), []).append(process(key, index, 1))
    assert right.keys() == {round(0.7 * (1 - insight), 6), round(0.7 + 0.3 * insight, 6)}
    for belief, outcomes in right.items():
        assert sum(outcomes) / len(outcomes) == pytest.approx(belief, abs=0.03)


def test_requests_differ_within_the_spread_and_drift_with_their_output() -> None:
    acceptance = RandomAcceptance(3, mean=0.5, spread=0.2, drift=-0.1)
    first = [acceptance.probability(key, 0) for key in range(200)]
    assert min(first) < 0.35 and max(first) > 0.65
    assert all(0.3 <= probability <= 0.7 for probability in first)
    assert acceptance.probability(5, 2000) == pytest.approx(first[5] - 0.2)
    assert acceptance.probability(5, 20_000) == 0.0


def test_settings_are_checked() -> None:
    for mean, spread, insight in ((-0.1, 0.0, 0.5), (1.1, 0.0, 0.5), (0.5, -1.0, 0.5), (0.5, 0.0, 1.5)):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            RandomAcceptance(1, mean, spread, insight=insight)
    with pytest.raises(ValueError, match="at least 0"):
        FixedAcceptance(-1)
