"""`select` against an enumeration of every legal cohort."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from flare.machines.selection.select import select
from flare.machines.selection.view import GraphRow, Phase, Plan, PolicyRow, RequestRow, View
from tests.machines.build import decode_shape, decoder, graph, prefill_shape, prompt, scored_shape, view
from tests.machines.oracle_select import Choice, Oracle

CASES = 1_500
BLOCK = 100


def _graphs(rng: random.Random) -> list[GraphRow]:
    shapes = [decode_shape(b) for b in rng.sample([1, 2, 3, 4, 6, 8], rng.randint(1, 4))]
    shapes += [prefill_shape(t) for t in rng.sample([16, 32, 64, 128, 256], rng.randint(0, 4))]
    shapes += [scored_shape(t) for t in rng.sample([16, 64, 256], rng.randint(0, 2))]
    unknown = rng.choice([0.0, 0.0, 0.1, 0.5])
    return [
        graph(shape, 0.0 if rng.random() < unknown else rng.uniform(0.5, 90.0), stale=rng.random() < 0.2)
        for shape in shapes
    ]


def _price(rng: random.Random) -> float | None:
    return None if rng.random() < 0.2 else rng.choice([rng.uniform(0.1, 60.0), rng.uniform(0.0, 1e6)])


def _prompt(rng: random.Random, slot: int) -> RequestRow:
    tokens = rng.randint(1, 400)
    position = rng.randrange(tokens)
    boundary = rng.choice([tokens, rng.randint(position + 1, tokens)])
    return prompt(
        slot,
        tokens,
        position=position,
        boundary=boundary,
        next_endpoint=rng.randint(position + 1, tokens),
        phase=rng.choice([Phase.PREFILL, Phase.PREFILL, Phase.SCORED_PREFILL]),
        output_left=rng.choice([0, 1, 50]),
        token_price=_price(rng),
        last_fence=rng.randint(0, 5),
    )


def _decoder(rng: random.Random, slot: int) -> RequestRow:
    return decoder(
        slot,
        token_price=_price(rng),
        delivery_price=_price(rng),
        age_ms=rng.uniform(0.0, 300.0),
        last_fence=rng.randint(0, 5),
        output_left=rng.choice([0, 1, 50, 50]),
    )


def random_view(rng: random.Random) -> View:
    policy = PolicyRow(
        output_token_value=rng.choice([64.0, 0.0, rng.uniform(0.1, 200.0)]),
        token_fairness=rng.choice([16.0, 0.0, rng.uniform(0.1, 30.0)]),
        delivery_fairness=rng.choice([4.0, 0.0, rng.uniform(0.1, 30.0)]),
        decode_age_price=rng.choice([0.1, 0.0, rng.uniform(0.01, 3.0)]),
        newcomer_share=rng.choice([8.0, 1.0, 2.5]),
    )
    requests = [
        (_decoder if rng.random() < 0.6 else _prompt)(rng, slot)
        for slot in sorted(rng.sample(range(64), rng.randint(1, 6)))
    ]
    scale = rng.choice([1.0, 1.0, rng.uniform(1e-6, 1.0)])
    return view(_graphs(rng), requests, policy=policy, value_scale=scale)


def _is(plan: Plan, choice: Choice) -> bool:
    """Same graph, same cohort, same work."""
    return (
        plan.shape == choice.graph.shape
        and tuple(lane.slot for lane in plan.lanes) == choice.slots
        and tuple(lane.tokens for lane in plan.lanes) == choice.tokens
    )


@pytest.mark.parametrize("block", range(CASES // BLOCK))
def test_the_best_of_all_legal_cohorts_is_chosen(block: int) -> None:
    for case in range(block * BLOCK, (block + 1) * BLOCK):
        taken = random_view(random.Random(case))
        choices, plan = Oracle(taken, float).choices(), select(taken).plan
        if not choices:
            assert plan is None, case
            continue
        assert plan is not None, case
        best = choices[0]
        assert (plan.duration_ns > 0) == best.known, case
        assert plan.score == pytest.approx(best.score, rel=1e-9, abs=1e-9), case
        behind = 1e-9 * max(1.0, abs(best.score))
        rivals = [one for one in choices[1:] if one.known == best.known and one.score >= best.score - behind]
        if not rivals:
            assert _is(plan, best), case


def _dyadic_view(rng: random.Random) -> View:
    """Numbers of few bits, so that all of the arithmetic is exact and ties are many."""
    kinds = [decode_shape, prefill_shape]
    graphs = [
        graph(kind(extent), rng.choice([0.0, 4.0, 8.0, 8.0]) if rng.random() < 0.5 else 8.0)
        for kind in kinds
        for extent in rng.sample([1, 2, 4] if kind is decode_shape else [16, 32, 64], 3)
    ]
    streams = rng.choice([0, 1, 2, 4])
    slots = rng.sample(range(64), streams + rng.randint(0 if streams else 1, 2))
    rows = [
        decoder(
            slot,
            token_price=rng.choice([8.0, 16.0]),
            delivery_price=16.0,
            age_ms=rng.choice([0.0, 8.0]),
            last_fence=rng.randint(0, 3),
        )
        for slot in slots[:streams]
    ]
    rows += [
        prompt(slot, rng.choice([16, 32, 64, 200]), token_price=8.0, last_fence=rng.randint(0, 2))
        for slot in slots[streams:]
    ]
    policy = PolicyRow(64.0, rng.choice([0.0, 16.0]), rng.choice([0.0, 4.0]), rng.choice([0.0, 0.5]), 8.0)
    return view(graphs, sorted(rows, key=lambda row: row.slot), policy=policy)


@pytest.mark.parametrize("block", range(6))
def test_exact_ties_follow_the_total_order(block: int) -> None:
    ties = 0
    for case in range(block * BLOCK, (block + 1) * BLOCK):
        taken = _dyadic_view(random.Random(case))
        choices, plan = Oracle(taken, Fraction).choices(), select(taken).plan
        assert plan is not None, case
        assert _is(plan, choices[0]), case
        assert Fraction(plan.score) == choices[0].score, case
        ties += len(choices) > 1 and choices[1].key[:2] == choices[0].key[:2]
    assert ties > 10
