"""Service prices against the reference numbers, and the properties that make them safe to run on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.ids import Fence
from flare.machines.prices import (
    MODERATE_LOG_PRICE,
    QueuedService,
    ServicePrices,
    charge,
    log_scale_for,
    newcomer_log_price,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())

log_prices = st.floats(-5_000.0, 5_000.0)
units = st.one_of(st.just(0.0), st.floats(1e-3, 1e6))
intervals_ms = st.floats(1e-6, 1e6)
adaptations_ms = st.floats(0.1, 1e5)


@pytest.mark.parametrize("case", VECTORS["charge"])
def test_charge_matches_the_reference(case: dict[str, float]) -> None:
    got = charge(math.log(case["price_ms"]), case["served"], case["interval_ms"], case["adaptation_ms"])
    assert math.exp(got) == pytest.approx(case["expect"], rel=1e-12)


@pytest.mark.parametrize("case", VECTORS["publication"])
def test_a_publication_replaces_the_charge(case: dict[str, float]) -> None:
    prices = ServicePrices(log_delivery=math.log(case["delivery_price_before_ms"]))
    prices.charge(Fence(7), 1.0, case["interval_ms"], case["adaptation_ms"])
    assert prices.log_delivery is not None
    assert math.exp(prices.log_delivery) == pytest.approx(case["expect_unpublished_ms"], rel=1e-12)
    prices.publish(Fence(7), case["adaptation_ms"])
    assert math.exp(prices.log_delivery) == pytest.approx(case["expect_published_ms"], rel=1e-12)


@pytest.mark.parametrize("case", VECTORS["projection"])
def test_projection_charges_copies(case: dict[str, object]) -> None:
    frames = case["frames_expected_units_and_ms"]
    price, tau = case["price_ms"], case["adaptation_ms"]
    assert isinstance(frames, list)
    assert isinstance(price, float)
    assert isinstance(tau, float)
    prices = ServicePrices(math.log(price), math.log(price))
    token, delivery = prices.projected([QueuedService(n, 1, ms) for n, ms in frames], tau)
    assert token is not None
    assert math.exp(token) == pytest.approx(case["expect_ms"], rel=1e-12)
    expected = math.log(price)
    for _, ms in frames:
        expected = charge(expected, 1.0, ms, tau)
    assert delivery == expected
    assert prices == ServicePrices(math.log(price), math.log(price))


@given(log_prices, units, intervals_ms, adaptations_ms)
def test_a_price_stays_positive_and_finite(log_price: float, served: float, interval: float, tau: float) -> None:
    assert math.isfinite(charge(log_price, served, interval, tau))


@given(st.floats(1e-3, 1e6), intervals_ms, adaptations_ms)
def test_the_inverse_of_the_measured_rate_is_the_fixed_point(served: float, interval: float, tau: float) -> None:
    fixed = math.log(interval) - math.log(served)
    assert charge(fixed, served, interval, tau) == pytest.approx(fixed, rel=1e-9, abs=1e-9)


@given(log_prices, units, intervals_ms, adaptations_ms, st.floats(0.01, 0.99))
def test_an_interval_cut_in_two_charges_the_same(
    log_price: float, served: float, interval: float, tau: float, cut: float
) -> None:
    first = charge(log_price, served * cut, interval * cut, tau)
    second = charge(first, served * (1 - cut), interval * (1 - cut), tau)
    assert second == pytest.approx(charge(log_price, served, interval, tau), rel=1e-9, abs=1e-8)


@given(st.floats(-50.0, 50.0), st.floats(1e-3, 1e4), intervals_ms, adaptations_ms)
def test_a_price_never_steps_over_its_fixed_point(log_price: float, served: float, interval: float, tau: float) -> None:
    fixed = math.log(interval) - math.log(served)
    after = charge(log_price, served, interval, tau)
    assert min(log_price, fixed) - 1e-9 <= after <= max(log_price, fixed) + 1e-9


def test_an_unserved_price_doubles_every_69_ms() -> None:
    doubling_ms = 100.0 * math.log(2.0)
    assert 69.0 < doubling_ms < 70.0
    assert charge(math.log(20.0), 0.0, doubling_ms, 100.0) == pytest.approx(math.log(40.0), rel=1e-15)


def test_an_unserved_price_grows_exactly_however_large_it_is() -> None:
    assert charge(1e9, 0.0, 50.0, 100.0) == 1e9 + 0.5
    assert charge(-1e9, 0.0, 50.0, 100.0) == -1e9 + 0.5


def test_service_brings_an_astronomic_price_back_at_once() -> None:
    after = charge(1e9, 1.0, 10.0, 100.0)
    # 1/price = (1/10)(1 - exp(-1/10)) where nothing is left of the old rate.
    assert math.exp(after) == pytest.approx(10.0 / (1.0 - math.exp(-0.1)), rel=1e-12)


@pytest.mark.parametrize(
    ("served", "interval", "tau", "field"),
    [(1.0, 0.0, 100.0, "interval_ms"), (1.0, 5.0, 0.0, "adaptation_ms"), (-1.0, 5.0, 100.0, "served")],
)
def test_what_cannot_be_charged_is_refused_by_name(served: float, interval: float, tau: float, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        charge(0.0, served, interval, tau)


def test_a_newcomer_starts_as_one_with_an_eighth_of_its_share() -> None:
    assert math.exp(newcomer_log_price(8.0, 16, 0.5)) == pytest.approx(8 * 16 / 0.5)
    prices = ServicePrices()
    prices.start(8.0, 16, None)
    assert prices.log_token is None
    prices.start(8.0, 16, 0.5)
    started = prices.log_token
    prices.start(8.0, 2, 9.0)
    assert started is not None
    assert prices.log_token == started


def test_an_unset_price_is_not_charged_and_not_projected() -> None:
    prices = ServicePrices()
    prices.charge(Fence(1), 3.0, 10.0, 100.0)
    assert prices.projected([QueuedService(1.0, 1, 10.0)], 100.0) == (None, None)


def test_the_first_publication_is_one_delivery_over_its_frame() -> None:
    prices = ServicePrices()
    prices.charge(Fence(3), 64.0, 40.0, 100.0)
    prices.publish(Fence(3), 100.0)
    assert prices.log_delivery == math.log(40.0)


def test_only_the_first_publication_of_the_latest_charge_corrects() -> None:
    prices = ServicePrices(log_delivery=math.log(30.0))
    prices.charge(Fence(4), 1.0, 10.0, 100.0)
    prices.charge(Fence(5), 1.0, 10.0, 100.0)
    charged = prices.log_delivery
    prices.publish(Fence(4), 100.0)
    assert prices.log_delivery == charged
    prices.publish(Fence(5), 100.0)
    corrected = prices.log_delivery
    assert corrected != charged
    prices.publish(Fence(5), 100.0)
    assert prices.log_delivery == corrected
    # The correction starts from the price after the earlier, uncorrected charge.
    assert corrected == charge(charge(math.log(30.0), 0.0, 10.0, 100.0), 1.0, 10.0, 100.0)


def test_moderate_prices_need_no_scale() -> None:
    assert log_scale_for([]) == 0.0
    assert log_scale_for([-3_000.0, 5.0, MODERATE_LOG_PRICE]) == 0.0


@given(st.lists(st.floats(-1e7, 1e7), min_size=1, max_size=64))
def test_scaled_prices_are_finite(logs: list[float]) -> None:
    scale = log_scale_for(logs)
    scaled = [math.exp(log - scale) for log in logs]
    assert scale >= 0.0
    assert all(64 * 65_536 * value < 1e300 for value in scaled)
    assert max(scaled) == pytest.approx(math.exp(min(max(logs), MODERATE_LOG_PRICE)), rel=1e-6)
