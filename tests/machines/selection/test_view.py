"""Views and decisions through JSON: nothing is lost, and the decision is the same."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.selection.select import select
from flare.machines.selection.view import Decision, View
from tests.machines.build import decode_shape, decoder, graph, queued, view
from tests.machines.oracle.cases import SORTS, case


@given(
    st.sampled_from(sorted(SORTS)),
    st.integers(0, 10_000),
    st.booleans(),
    st.booleans(),
    st.floats(0.0, 1e9),
    st.integers(0, 2**62),
)
def test_a_decision_is_the_same_after_the_view_went_through_json(
    sort: str, number: int, queue: bool, overrun: bool, log_scale: float, last_fence: int
) -> None:
    drawn = case(sort, number)
    busy = (queued(decode_shape(1), 0),) if queue else ()
    taken = msgspec.structs.replace(
        drawn,
        overrun=overrun,
        log_scale=log_scale,
        window=busy,
        graphs=(graph(decode_shape(5), 9.0), *drawn.graphs),
        requests=tuple([msgspec.structs.replace(row, last_fence=last_fence) for row in drawn.requests]),
    )
    again = msgspec.json.decode(msgspec.json.encode(taken), type=View)
    assert again == taken
    decision = select(taken, explain=True)
    assert select(again, explain=True) == decision
    assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision


@given(st.floats(0.0, allow_infinity=False), st.floats(0.0, allow_infinity=False))
def test_prices_keep_their_last_bit(token: float, delivery: float) -> None:
    taken = view([], [decoder(0, token_price=token, delivery_price=delivery), decoder(1, token_price=None)])
    assert msgspec.json.decode(msgspec.json.encode(taken), type=View) == taken


def test_a_damaged_view_is_refused_by_field() -> None:
    data = msgspec.json.encode(view([graph(decode_shape(1), 8.0)], []))
    with pytest.raises(msgspec.ValidationError, match="duration_ns"):
        msgspec.json.decode(data.replace(b'"duration_ns":8000000', b'"duration_ns":"8"'), type=View)
    with pytest.raises(msgspec.ValidationError, match="value_scale"):
        msgspec.json.decode(data.replace(b'"value_scale":1.0,', b""), type=View)
