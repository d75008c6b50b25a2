"""Views and decisions through JSON: nothing is lost, and the decision is the same."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.selection.codec import decode_decision, decode_view, encode_decision, encode_view
from flare.machines.selection.select import select
from tests.machines.build import decode_shape, decoder, graph, queued, view
from tests.machines.selection.test_enumeration import random_view


@given(st.randoms(use_true_random=False), st.booleans(), st.floats(0.0, 1e9), st.integers(0, 2**62))
def test_a_decision_is_the_same_after_the_view_went_through_json(
    rng: random.Random, overrun: bool, log_scale: float, last_commit: int
) -> None:
    drawn = random_view(rng)
    busy = (queued(decode_shape(1), 0),) if rng.random() < 0.5 else ()
    taken = msgspec.structs.replace(
        drawn,
        overrun=overrun,
        log_scale=log_scale,
        window=busy,
        graphs=(graph(decode_shape(5), 9.0), *drawn.graphs),
        requests=tuple([msgspec.structs.replace(row, last_commit=last_commit) for row in drawn.requests]),
    )
    again = decode_view(encode_view(taken))
    assert again == taken
    decision = select(taken, explain=True)
    assert select(again, explain=True) == decision
    assert decode_decision(encode_decision(decision)) == decision


@given(st.floats(0.0, allow_infinity=False), st.floats(0.0, allow_infinity=False))
def test_prices_keep_their_last_bit(token: float, delivery: float) -> None:
    taken = view([], [decoder(0, token_price=token, delivery_price=delivery), decoder(1, token_price=None)])
    assert decode_view(encode_view(taken)) == taken


@pytest.mark.parametrize("price", [float("inf"), float("nan")])
def test_a_price_that_json_cannot_carry_is_refused_by_name(price: float) -> None:
    with pytest.raises(ValueError, match="delivery_price of slot 4"):
        encode_view(view([], [decoder(4, delivery_price=price)]))


def test_a_damaged_view_is_refused_by_field() -> None:
    data = encode_view(view([graph(decode_shape(1), 8.0)], []))
    with pytest.raises(msgspec.ValidationError, match="duration_ns"):
        decode_view(data.replace(b'"duration_ns":8000000', b'"duration_ns":"8"'))
    with pytest.raises(msgspec.ValidationError, match="value_scale"):
        decode_view(data.replace(b'"value_scale":1.0,', b""))
