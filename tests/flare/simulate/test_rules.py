"""What each rule decides where it differs from the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.simulate.arrivals import OpenLoop
from flare.simulate.iteration import simulate
from flare.simulate.rules.by_name import canonical, is_rule, make_rule
from flare.simulate.rules.fastserve import FastServeRule
from flare.simulate.rules.prefill_first import PrefillFirstRule
from flare.simulate.rules.sarathi import SarathiRule
from flare.simulate.rules.vllm import VllmRule
from flare.simulate.rules.vtc import VtcRule
from tests.flare.simulate.worlds import Bench, flat_costs, request, tokens_of

NAMES = (
    *("vllm:8", "vllm:2048", "sarathi:8", "sarathi:512", "prefill-first:32", "prefill-first:8192"),
    *("vtc", "fastserve", "fastserve:100"),
)


# vLLM


def test_vllm_spends_one_budget_on_whoever_runs_and_the_rest_on_newcomers() -> None:
    bench = Bench(VllmRule(100))
    bench.arrive(request(prompt=30), request(prompt=200), request(prompt=50))
    assert bench.step() == [(0, 30), (1, 70)]
    assert bench.step() == [(0, 1), (1, 99)]
    assert bench.step() == [(0, 1), (1, 31), (2, 50)]


def test_vllm_keeps_the_place_in_line_so_that_a_chunk_can_take_a_decodes_budget() -> None:
    bench = Bench(VllmRule(10))
    bench.arrive(request(prompt=25), request(prompt=5))
    assert bench.steps(3) == [[(0, 10)], [(0, 10)], [(0, 5), (1, 5)]]


def test_vllm_preempts_the_last_admitted_who_computes_everything_anew_and_is_next() -> None:
    bench = Bench(VllmRule(100), blocks=4)
    first, second = bench.arrive(request(prompt=30, output=30), request(prompt=30, output=30))
    assert bench.step() == [(0, 30), (1, 30)]
    assert bench.step() == [(0, 1), (1, 1)]
    assert bench.step() == [(0, 1), (1, 1)]
    assert bench.step() == [(0, 1)]
    assert (second.done, second.produced, second.blocks) == (0, 3, 0)
    assert list(bench.pool.waiting) == [second]
    while first.produced < first.output:
        bench.step()
    assert bench.step() == [(1, 33)]


def test_vllm_admits_only_a_prompt_that_finds_room_as_a_whole() -> None:
    bench = Bench(VllmRule(16), blocks=4)
    bench.arrive(request(prompt=32, output=2), request(prompt=48))
    assert bench.steps(3) == [[(0, 16)], [(0, 16)], [(0, 1)]]
    assert bench.step() == [(1, 16)]


# Sarathi


def test_sarathi_puts_all_decodes_before_prompts_under_way() -> None:
    bench = Bench(SarathiRule(10))
    bench.arrive(request(prompt=25), request(prompt=5))
    assert bench.steps(3) == [[(0, 10)], [(0, 10)], [(0, 5), (1, 5)]]
    bench.arrive(request(prompt=30))
    assert bench.step() == [(0, 1), (1, 1), (2, 8)]
    assert bench.step() == [(0, 1), (1, 1), (2, 8)]


def test_sarathi_reserves_the_whole_prompt_with_its_first_chunk() -> None:
    bench = Bench(SarathiRule(16), blocks=10)
    (job,) = bench.arrive(request(prompt=64))
    bench.step()
    assert job.done == 16 and job.blocks == 4


def test_sarathi_leaves_a_watermark_free() -> None:
    bench = Bench(SarathiRule(10_000), blocks=200)
    bench.arrive(request(prompt=16 * 99), request(prompt=16 * 100), request(prompt=16 * 99))
    assert bench.step() == [(0, 16 * 99)]
    bench = Bench(SarathiRule(10_000), blocks=200)
    bench.arrive(request(prompt=16 * 99), request(prompt=16 * 99))
    assert [index for index, _ in bench.step()] == [0, 1]


def test_sarathi_preempts_the_youngest() -> None:
    bench = Bench(SarathiRule(100), blocks=5)
    _, second = bench.arrive(request(prompt=30, output=40), request(prompt=30, output=40))
    bench.steps(3)
    assert bench.step() == [(0, 1)]
    assert second.blocks == 0 and second.produced == 3


# Prefill first


def test_prefill_first_stalls_decodes_while_prompts_come() -> None:
    bench = Bench(PrefillFirstRule(8192))
    bench.arrive(request(prompt=30, output=9))
    assert bench.step() == [(0, 30)]
    bench.arrive(request(prompt=40, output=9))
    assert bench.step() == [(1, 40)]
    assert bench.step() == [(0, 1), (1, 1)]


def test_prefill_first_chunks_one_prompt_at_a_time() -> None:
    bench = Bench(PrefillFirstRule(64))
    bench.arrive(request(prompt=30), request(prompt=100), request(prompt=10))
    assert bench.step() == [(0, 30), (1, 32)]
    assert bench.step() == [(1, 64)]
    assert bench.step() == [(1, 4), (2, 10)]


def test_prefill_first_admits_by_a_guess_of_the_output_and_retracts_the_shortest() -> None:
    bench = Bench(PrefillFirstRule(8192), blocks=25)
    (first,) = bench.arrive(request(prompt=16, output=200))
    bench.step()
    # 400 tokens do not hold both to their ends; 70% of the first one's output and all of the second's do fit.
    second, third = bench.arrive(request(prompt=16, output=200), request(prompt=16, output=200))
    assert bench.step() == [(1, 16)]
    while second.blocks:
        bench.step()
    assert list(bench.pool.waiting) == [third, second] and first.blocks
    assert second.done == 0 and 1 < second.produced < 200


# VTC


def test_vtc_serves_the_client_that_had_least() -> None:
    bench = Bench(VtcRule(), slots=1)
    bench.arrive(
        request(prompt=50, output=2, client="a"),
        request(prompt=50, output=2, client="a"),
        request(prompt=50, output=2, client="b"),
    )
    assert bench.steps(2) == [[(0, 50)], [(0, 1)]]
    assert bench.steps(2) == [[(2, 50)], [(2, 1)]]


def test_vtc_lifts_a_client_that_comes_back() -> None:
    rule = VtcRule()
    bench = Bench(rule, slots=1)
    bench.arrive(*(request(prompt=50, output=2, client="a") for _ in range(4)))
    bench.steps(4)
    assert rule.counters["a"] == 2 * (50 + 2 * 2)
    bench.arrive(request(prompt=10, client="b"))
    assert rule.counters["b"] == rule.counters["a"]


def test_vtc_prefills_apart_every_ten_decode_steps() -> None:
    bench = Bench(VtcRule())
    bench.arrive(request(prompt=20, output=30))
    assert bench.step() == [(0, 20)]
    bench.arrive(request(prompt=5, output=3))
    assert bench.steps(10) == [[(0, 1)]] * 10
    assert bench.step() == [(1, 5)]
    assert bench.step() == [(0, 1), (1, 1)]


def test_vtc_admits_while_all_could_run_to_their_limits() -> None:
    bench = Bench(VtcRule(), blocks=100)
    bench.arrive(request(prompt=20, output=30), request(prompt=20, output=29), request(prompt=1, output=30))
    # The first two come to 98 when the shorter one ends; all three would come to 128 then.
    assert bench.step() == [(0, 20), (1, 20)]


# FastServe


def test_fastserve_joins_the_level_that_the_prompt_fits() -> None:
    bench = Bench(FastServeRule(100), slots=1)
    bench.arrive(request(prompt=3000), request(prompt=500))  # 30 ms and 5 ms alone: levels 2 and 0
    assert bench.step() == [(1, 500)]


def test_fastserve_lets_a_newcomer_pass_one_that_has_used_its_quantum() -> None:
    bench = Bench(FastServeRule(100), slots=1)
    bench.arrive(request(output=50))
    assert [bench.step(6.0) for _ in range(2)] == [[(0, 8)], [(0, 1)]]
    bench.arrive(request(output=50))
    assert bench.step(6.0) == [(1, 8)], "the first has gone down a level"
    assert bench.step(6.0) == [(1, 1)]
    assert bench.step(6.0) == [(1, 1)], "demoted, it goes to the front of the lower level"


def test_fastserve_batches_prompts_with_decodes_up_to_a_limit() -> None:
    bench = Bench(FastServeRule())
    bench.arrive(request(prompt=1000), request(prompt=1000), request(prompt=1000))
    assert bench.step() == [(0, 1000), (1, 1000)]
    assert bench.step() == [(0, 1), (1, 1), (2, 1000)]


def test_fastserve_holds_as_many_caches_as_it_may() -> None:
    bench = Bench(FastServeRule(), slots=2)
    bench.arrive(*(request(output=50) for _ in range(3)))
    for _ in range(20):
        assert {index for index, _ in bench.step()} == {0, 1}


def test_fastserve_promotes_the_starved() -> None:
    bench = Bench(FastServeRule(100), slots=1)
    bench.arrive(request(prompt=3_000, output=3))  # 30 ms alone: two levels down
    for _ in range(999):
        bench.arrive(request(output=1))
        assert bench.step(10.0) != [(0, 3_000)]
    bench.arrive(request(output=1))
    bench.step(10.0)
    assert bench.rule.schedule(bench.pool, bench.now_ms).works[0].job is bench.jobs[0]


def test_fastserve_swaps_at_the_speed_of_the_link() -> None:
    costs = replace(flat_costs(), kv_bytes_per_token=1_000_000)
    bench = Bench(FastServeRule(100), slots=1, blocks=4, costs=costs)
    first, _ = bench.arrive(request(prompt=40, output=20), request(prompt=40, output=20))
    bench.step(20.0)
    batch = bench.rule.schedule(bench.pool, bench.now_ms)
    assert [job.index for job, _ in batch.works] == [1]
    assert batch.extra_ms == pytest.approx(40 * 1_000_000 / 25e6)
    assert first.blocks == 0 and first.done == 40, "its cache is on the host"


# All


def test_names() -> None:
    assert canonical("vllm") == "vllm:2048" and canonical("sarathi:0512") == "sarathi:512"
    assert canonical("fastserve") == "fastserve" and canonical("fastserve:70") == "fastserve:70"
    assert is_rule("vtc") and not is_rule("balanced") and not is_rule("./vllm.toml")
    for wrong in ("vtc:5", "vllm:none", "sarathi:0", "prefill-first:15", "vllm:²", f"vllm:{'1' * 20}"):
        with pytest.raises(ValueError, match=wrong):
            make_rule(wrong)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    load=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 150), st.integers(1, 40), st.sampled_from("abc")),
        min_size=1,
        max_size=25,
    ),
    slots=st.integers(1, 6),
)
def test_every_rule_serves_everything_exactly_once(
    name: str, load: list[tuple[float, int, int, str]], slots: int
) -> None:
    """With a cache that holds little more than the largest request, and less of it than all want."""
    requests = sorted((request(*row) for row in load), key=lambda one: one.arrival_s)
    outcomes = simulate(make_rule(name), OpenLoop(requests), flat_costs(), slots=slots, kv_tokens=240)
    for outcome in outcomes:
        assert not outcome.refused and outcome.finished
        assert len(outcome.tokens) == outcome.request.output_tokens
        assert sum(tokens for _, tokens in outcome.prompts) == outcome.request.prompt_tokens
        assert list(outcome.tokens) == sorted(set(outcome.tokens)), "one token an iteration, in order"
        assert outcome.tokens[0] >= outcome.prompts[-1][0] > outcome.arrival_ns


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("vllm", "sarathi"))])
def test_budget_rules_keep_to_their_budget(name: str) -> None:
    bench = Bench(make_rule(name), slots=6)
    bench.arrive(*(request(prompt=7 * place + 1, output=9) for place in range(12)))
    budget = int(name.partition(":")[2])
    for _ in range(40):
        assert tokens_of(bench.step()) <= budget
