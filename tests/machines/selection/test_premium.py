"""Time prices and the value of a first output, by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind
from flare.machines.selection.board import Board
from flare.machines.selection.select import select
from flare.machines.selection.view import Candidate, Phase, PolicyRow, RequestRow, View
from tests.machines.build import (
    decode_shape,
    decoder,
    graph,
    packed_shape,
    prefill_shape,
    prompt,
    scored_shape,
    speculative_shape,
    stage_shape,
    view,
)

NOTHING = PolicyRow(0.0, 0.0, 0.0, 0.0, 8.0)
OUTPUT = msgspec.structs.replace(NOTHING, output_time_price=10.0)
PROMPT = msgspec.structs.replace(NOTHING, prompt_time_price=10.0)
FIRST = msgspec.structs.replace(NOTHING, first_output_value=600.0)
URGENT = msgspec.structs.replace(NOTHING, first_output_urgency=10.0, first_output_patience_ms=200.0)


def candidates(taken: View) -> dict[str, Candidate]:
    return {candidate.shape.name: candidate for candidate in select(taken, explain=True).candidates}


def per_token(policy: PolicyRow, row: RequestRow, ms: float = 32.0) -> float:
    """What one token of a prompt is worth beside the token itself, beside a graph of 64 tokens that takes `ms`."""
    board = Board.of(view([graph(prefill_shape(64), ms)], [row], policy=policy))
    return float(board.prompts.token_value[0]) - 1.0


def test_a_round_earns_the_time_that_it_costs_at_the_best_rate() -> None:
    graphs = [graph(decode_shape(1), 5.0), graph(decode_shape(2), 8.0), graph(decode_shape(64), 40.0)]
    found = candidates(view(graphs, [decoder(0), decoder(1)], policy=OUTPUT))
    # Two streams: 5, 4 and 20 ms a row. In every graph a lane earns 4 ms.
    assert (found["decode/b1"].service, found["decode/b2"].service) == (40.0, 80.0)
    assert found["decode/b2"].score == 80.0 / 8.0
    three = candidates(view(graphs, [decoder(slot) for slot in range(10)], policy=OUTPUT))
    assert three["decode/b64"].service == 10 * 10.0 * 4.0


def test_a_round_earns_its_time_once_however_many_tokens_it_gives() -> None:
    wide = graph(speculative_shape(2, 3), 9.0)
    rows = [decoder(slot, survival=(0.9, 0.8)) for slot in range(2)]
    (found,) = select(view([wide], rows, policy=OUTPUT), explain=True).candidates
    assert found.service == 2 * 10.0 * 4.5


def test_a_blocked_stream_earns_by_the_rate_of_all_streams() -> None:
    graphs = [graph(decode_shape(1), 5.0), graph(decode_shape(2), 6.0), graph(stage_shape(GraphKind.RESUME, 1), 1.0)]
    board = Board.of(view(graphs, [decoder(0), decoder(1, stages=(GraphKind.RESUME,))], policy=OUTPUT))
    assert board.streams.service.tolist() == [[50.0, 30.0]]


def test_a_prompt_token_earns_the_time_that_it_costs_at_the_best_rate() -> None:
    graphs = [graph(prefill_shape(64), 32.0), graph(packed_shape(256, 2), 64.0)]
    found = candidates(view(graphs, [prompt(0, 50)], policy=PROMPT))
    assert found["prefill/t64"].service == 50 * (1.0 + 10.0 * 0.25)
    scored = prompt(0, 50, phase=Phase.SCORED_PREFILL)
    found = candidates(view([*graphs, graph(scored_shape(64), 64.0)], [scored], policy=PROMPT))
    assert found["scored_prefill/t64"].service == 50 * (1.0 + 10.0)


@pytest.mark.parametrize("policy", [PROMPT, URGENT])
def test_time_that_was_never_measured_has_no_price(policy: PolicyRow) -> None:
    assert per_token(policy, prompt(0, 50, age_ms=200.0), ms=0.0) == 0.0
    assert Board.of(view([graph(decode_shape(1))], [decoder(0)], policy=OUTPUT)).streams.service.tolist() == [[0.0]]


def test_a_first_output_is_worth_the_more_the_less_is_missing() -> None:
    assert per_token(FIRST, prompt(0, 300)) == 2.0
    assert per_token(FIRST, prompt(0, 300, position=200)) == 6.0
    rows = [prompt(0, 300), prompt(1, 100), prompt(2, 64)]
    plan = select(view([graph(packed_shape(256, 4), 9.0)], rows, policy=FIRST)).plan
    assert plan is not None
    assert [lane.tokens for lane in plan.lanes] == [92, 100, 64]


def test_a_first_output_grows_without_end() -> None:
    growing = msgspec.structs.replace(FIRST, first_output_growth_ms=100.0)
    for age_ms in (0.0, 50.0, 1e6):
        assert per_token(FIRST, prompt(0, 300, age_ms=age_ms)) == 2.0
        assert per_token(growing, prompt(0, 300, age_ms=age_ms)) == pytest.approx(2.0 * (1.0 + age_ms / 100.0))


def test_urgency_is_greatest_at_the_patience() -> None:
    assert per_token(URGENT, prompt(0, 300)) == 0.0
    assert per_token(URGENT, prompt(0, 300, age_ms=200.0)) == 10.0 * 0.5


@given(st.floats(0.0, 1e7))
def test_urgency_rises_and_falls(age_ms: float) -> None:
    here, nearer = (per_token(URGENT, prompt(0, 300, age_ms=a)) for a in (age_ms, (9.0 * age_ms + 200.0) / 10.0))
    assert 0.0 <= here <= nearer + 1e-9 <= 5.0 + 2e-9


@given(st.floats(1.0, 1e5))
def test_half_the_patience_is_as_urgent_as_twice_of_it(age_ms: float) -> None:
    one, other = (per_token(URGENT, prompt(0, 300, age_ms=a)) for a in (age_ms, 200.0 * 200.0 / age_ms))
    assert one == pytest.approx(other, abs=1e-9)
