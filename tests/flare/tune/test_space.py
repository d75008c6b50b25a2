"""The axes of the search: what they cover, and that values survive the way to a coordinate and back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.config.convert import checked_table
from flare.config.loader import load_policy
from flare.config.schema import Policy
from flare.tune.space import AXES, Axis, point_of, policy_at

FIXED = {
    "terminal_value",
    "terminal_age_price",
    "adaptation_ms",
    "estimate_ttl_ms",
    "adaptive_verification_alpha",
    "host_gap_pricing",
}


def test_every_coefficient_is_searched_or_known_to_be_fixed() -> None:
    keys = [axis.key for axis in AXES]
    assert len(keys) == len(set(keys))
    assert set(keys) | FIXED == {field.name for field in msgspec.structs.fields(Policy)} and not FIXED & set(keys)


@given(st.sampled_from(AXES), st.floats(0, 1))
def test_every_coordinate_is_a_value_that_a_policy_file_may_hold(axis: Axis, coordinate: float) -> None:
    value = axis.value(coordinate)
    checked_table(Policy, {axis.key: value}, lambda key: key)
    assert value == 0.0 if value < axis.low * 0.999 else value <= axis.high * 1.001


@given(st.sampled_from(AXES), st.floats(0.15, 0.85))
def test_values_come_back_to_three_digits(axis: Axis, coordinate: float) -> None:
    value = axis.value(coordinate)
    assert axis.value(axis.coordinate(value)) == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis.off_at is not None], ids=lambda axis: axis.key)
def test_an_end_is_off(axis: Axis) -> None:
    assert axis.off_at is not None
    assert axis.value(axis.off_at) == 0.0 and axis.value(1 - axis.off_at) > 0.0
    assert axis.value(axis.coordinate(0.0)) == 0.0


@pytest.mark.parametrize("name", ["balanced", "interactive", "throughput"])
def test_presets_lie_in_the_cube(name: str) -> None:
    preset = load_policy(name)
    again = policy_at(point_of(preset), preset)
    for field in msgspec.structs.fields(Policy):
        assert getattr(again, field.name) == pytest.approx(getattr(preset, field.name), rel=0.01), field.name
