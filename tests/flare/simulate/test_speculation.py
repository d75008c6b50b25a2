"""Closed loops and speculation: the same requests and the same right proposals for everybody, and what the other
servers' controllers make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.cli import main
from flare.config.loader import load_policy
from flare.config.schema import ConfigError
from flare.graphs.sim.acceptance import FixedAcceptance, RandomAcceptance
from flare.graphs.sim.costs import CostTable, Curve, Surface, load_costs
from flare.graphs.speculative_shapes import speculative_shapes
from flare.machines.graph import GraphKind, GraphShape, Source
from flare.simulate.arrivals import LENGTHS, Arrivals, ClosedLoop, OpenLoop
from flare.simulate.cells import CLOSED_LOOP, Cell, check, run_cell
from flare.simulate.iteration import simulate
from flare.simulate.outcome import Outcome
from flare.simulate.plots import draw
from flare.simulate.report import LOOP_HEADINGS, loop_cells_of
from flare.simulate.rules.by_name import canonical, make_rule
from flare.simulate.rules.drafting import TableRule
from flare.simulate.rules.turbospec import TurboSpecRule
from flare.simulate.serving import VirtualServer
from flare.simulate.speculation import Proposer, Speculation, parse_acceptance
from tests.flare.simulate.worlds import TABLE, Bench, flat_costs, request

SPECULATING = ("static:0", "static:3", "turbospec:5", "vllm-table", "vllm-adaptive:4")
PROCESS = RandomAcceptance(3, mean=0.6, spread=0.3, insight=0.6)


def wide_costs(draft_ms: float = 1.0, row_ms: float = 0.0) -> CostTable:
    """A step takes 10 ms, each target position beyond the first of a row `row_ms` more, each proposal `draft_ms`."""
    grid = Surface({width: Curve({0.0: 10.0, 64.0: 10.0 + 64 * (width - 1) * row_ms}) for width in (1.0, 9.0)})
    return replace(flat_costs(), verify_grid=grid, draft=Curve({1.0: draft_ms}))


def steps(outcome: Outcome) -> list[int]:
    """How many tokens came at once, each time."""
    return [len(list(tokens)) for _, tokens in groupby(outcome.tokens)]


def flare(arrivals: Arrivals, catalog: tuple[GraphShape, ...], **more: bool) -> list[Outcome]:
    server = VirtualServer(
        arrivals,
        load_policy("throughput"),
        (*catalog, GraphShape(GraphKind.PREFILL, 1, 64)),
        wide_costs(),
        slots=4,
        kv_tokens=4000,
        proposer=Proposer(PROCESS, PROCESS.confidence),
        keeps_prefixes=more.get("keeps_prefixes", False),
    )
    outcomes = server.run()
    server.scheduler.check()
    assert server.scheduler.idle
    return outcomes


# The same for everybody


def test_a_stream_asks_the_same_whoever_serves_it_and_when() -> None:
    asked = []
    for took_ns in (10, 70):
        loop, now_ns = ClosedLoop(2, 1e-6, seed=5), 0
        while (at_ns := loop.next_ns()) is not None:
            assert at_ns == now_ns
            taken = [outcome for _, outcome in loop.take(now_ns)]
            now_ns += took_ns
            for outcome in taken:
                loop.ended(now_ns, outcome)
        assert now_ns >= 1000
        asked.append([replace(outcome.request, arrival_s=0.0) for outcome in loop.outcomes])
    few, many = sorted(asked, key=len)
    assert many[: len(few)] == few and len(many) > len(few)
    assert len({one.seed for one in many}) == len(many)
    assert all(LENGTHS[0] <= size <= LENGTHS[1] for one in many for size in (one.prompt_tokens, one.output_tokens))


@pytest.mark.parametrize("depth", [1, 3])
def test_flare_and_a_rule_see_the_same_proposals_accepted(depth: int) -> None:
    load = [replace(request(0.0, 20 + place, 60), seed=place) for place in range(4)]
    theirs = simulate(
        make_rule(f"static:{depth}"),
        OpenLoop(load),
        wide_costs(),
        slots=4,
        kv_tokens=4000,
        acceptance=PROCESS,
    )
    rounds = speculative_shapes((1, 2, 4), (depth + 1,), envelope=64)
    catalog = tuple(shape for shape in rounds if shape.width == depth + 1)
    ours = flare(OpenLoop(load), catalog, keeps_prefixes=True)
    assert [steps(outcome) for outcome in ours] == [steps(outcome) for outcome in theirs]
    assert len({tuple(steps(outcome)) for outcome in ours}) == 4, "each request has its own"


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=8))
def test_every_token_comes_once_whatever_is_verified(load: list[tuple[float, int, int]]) -> None:
    requests = [replace(request(*row), seed=place) for place, row in enumerate(sorted(load))]
    rounds = (*speculative_shapes((1, 2, 4), (2, 4), envelope=8, ragged=True),)
    served = [flare(OpenLoop(requests), rounds)]
    for name in SPECULATING:
        served.append(
            simulate(make_rule(name), OpenLoop(requests), wide_costs(), slots=3, kv_tokens=240, acceptance=PROCESS)
        )
    for outcomes in served:
        for outcome in outcomes:
            assert outcome.finished and not outcome.refused
            assert len(outcome.tokens) == outcome.request.output_tokens
            assert sum(tokens for _, tokens in outcome.prompts) == outcome.request.prompt_tokens
            assert list(outcome.tokens) == sorted(outcome.tokens)


# What rounds cost


def test_a_round_costs_its_targets_and_its_proposals() -> None:
    (outcome,) = simulate(
        make_rule("static:2"),
        OpenLoop([request(0.0, 8, 7)]),
        wide_costs(draft_ms=1.0, row_ms=0.5),
        slots=1,
        kv_tokens=400,
        acceptance=FixedAcceptance(7),
    )
    first, *rest = (at for at, _ in groupby(outcome.tokens))
    assert [at - first for at in rest] == [13_000_000, 26_000_000]
    assert steps(outcome) == [1, 3, 3]


# Controllers


def test_names() -> None:
    assert canonical("static:0") == "static:0" and canonical("static") == "static:3"
    assert canonical("turbospec") == "turbospec:7" and canonical("vllm-adaptive") == "vllm-adaptive:7"
    for wrong in ("turbospec:0", "vllm-table:3", "static:-1", "vllm:0"):
        with pytest.raises(ValueError, match=wrong):
            make_rule(wrong)


def test_the_table_follows_the_step_before() -> None:
    bench = Bench(TableRule(((1, 2, 3), (3, 4, 1))))
    bench.arrive(*(request(prompt=4, output=100) for _ in range(2)))
    bench.step()
    assert [tokens for _, tokens in bench.step()] == [4, 4]
    bench.arrive(request(prompt=4, output=100))
    assert [tokens for _, tokens in bench.step()] == [4, 4, 4]
    assert [tokens for _, tokens in bench.step()] == [2, 2, 2]


def depth_of(accepted: int, draft_ms: float) -> int:
    """Where TurboSpec comes to."""
    rule, load = TurboSpecRule(5), [request(0.0, 8, 400)]
    simulate(
        rule,
        OpenLoop(load),
        wide_costs(draft_ms),
        slots=1,
        kv_tokens=800,
        acceptance=FixedAcceptance(accepted),
        until_ns=1_000_000_000,
    )
    return rule.depth


def test_turbospec_goes_as_deep_as_pays() -> None:
    assert depth_of(5, draft_ms=1.0) == 5
    assert depth_of(1, draft_ms=1.0) in (1, 2)
    assert depth_of(5, draft_ms=20.0) == 0


def test_turbospec_begins_again_where_it_has_stopped() -> None:
    rule, costs = TurboSpecRule(5), wide_costs(1.0)
    bench = Bench(rule, costs=costs)
    bench.arrive(request(prompt=4, output=400))
    bench.step()
    rule.alpha = 0.0
    widths = [tokens for _ in range(41) for _, tokens in bench.step()]
    assert widths[:20] == [1] * 20 and widths[20] > 1


@pytest.mark.parametrize(("mean", "row_ms", "most"), [(0.9, 0.01, 4.0), (0.1, 2.0, 1.2)])
def test_adaptive_verification_verifies_what_pays(mean: float, row_ms: float, most: float) -> None:
    """Proposals are always made; whether they are verified depends on what that costs and on how many are right."""
    rule = make_rule("vllm-adaptive:3")
    counts: list[int] = []
    scheduled = rule.schedule

    def watched(pool, now_ms):  # type: ignore[no-untyped-def]
        batch = scheduled(pool, now_ms)
        decoding = [(job, tokens) for job, tokens in batch.works if job.decoding and job.output - job.produced > 3]
        counts.extend(tokens for _, tokens in decoding)
        assert batch.proposals == 3 or not decoding
        return batch

    rule.schedule = watched  # type: ignore[method-assign]
    load = [replace(request(0.0, 8, 120), seed=place) for place in range(4)]
    process = RandomAcceptance(1, mean)
    simulate(rule, OpenLoop(load), wide_costs(1.0, row_ms), slots=4, kv_tokens=4000, acceptance=process)
    average = sum(counts) / len(counts)
    assert average > 0.9 * most if most > 2 else average < most


# Runs


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    costs, draft, recipe = tmp_path / "costs.json", tmp_path / "draft.json", tmp_path / "recipe.toml"
    wide = {"verify": {"2": {"1": 5.2, "64": 20.5}, "4": {"1": 5.5, "64": 22.0}}}
    costs.write_text(json.dumps(TABLE | wide), encoding="utf-8")
    draft.write_text(json.dumps({"decode": {"1": 0.5, "64": 1.0}}), encoding="utf-8")
    recipe.write_text(
        'name = "small"\nprefill_tokens = [512]\nscored_prefill_tokens = [512]\ndecode_batches = [1, 2, 4]\n'
        "draft_widths = [2, 4]\nmixed_batches = [2, 4]\nmixed_prefill_tokens = [256]\nragged = true\n",
        encoding="utf-8",
    )
    return Cell(
        policy="throughput",
        trace=CLOSED_LOOP,
        costs=str(costs),
        slots=4,
        window_s=6.0,
        warmup_s=1.0,
        streams=2,
        recipe=str(recipe),
        speculation=Speculation(draft_costs=str(draft), target_rows=16),
    )


def other(cell: Cell, **changes: object) -> Cell:
    return msgspec.structs.replace(cell, **changes)


def speculating(cell: Cell, **changes: object) -> Cell:
    assert not isinstance(cell.speculation, msgspec.UnsetType)
    return other(cell, speculation=msgspec.structs.replace(cell.speculation, **changes))


def test_a_closed_loop_keeps_its_streams_busy_and_ends_with_the_window(cell: Cell, tmp_path: Path) -> None:
    cells = [other(cell, policy=policy) for policy in (*SPECULATING, "throughput")]
    check(cells)
    results = [run_cell(each) for each in cells]
    for result in results:
        figures = result.figures
        assert figures == run_cell(result.cell).figures
        assert figures.requests > 4 and figures.unfinished == 2 and figures.latency_p50 is not None
        assert len(loop_cells_of(result)) == len(LOOP_HEADINGS)
    rates = {result.cell.policy: result.figures.output_tokens_per_s for result in results}
    assert rates["throughput"] > 1.5 * rates["static:0"]
    (path,) = draw(results, tmp_path / "plots", "svg")
    assert path.name == "streams.svg" and b">turbospec:5<" in path.read_bytes()


def test_what_is_before_the_warm_up_is_in_no_figure(cell: Cell) -> None:
    whole, later = (run_cell(other(cell, warmup_s=warmup)).figures for warmup in (0.0, 3.0))
    assert later.requests < whole.requests
    tokens = [figures.output_tokens_per_s * span for figures, span in ((whole, 6.0), (later, 3.0))]
    assert 0.3 * tokens[0] < tokens[1] < 0.7 * tokens[0]


def test_modes_differ_in_their_graphs_alone(cell: Cell) -> None:
    off, two, four, told = (
        run_cell(speculating(cell, **change)).figures
        for change in ({"mode": "off"}, {"mode": "fixed:2"}, {"mode": "fixed:4"}, {"insight": 0.8})
    )
    assert off.output_tokens_per_s < min(two.output_tokens_per_s, four.output_tokens_per_s, told.output_tokens_per_s)


def test_what_does_not_go_together_is_found_before_any_run(cell: Cell) -> None:
    for changes, told in (
        ({"streams": msgspec.UNSET}, "one needs the other"),
        ({"window_s": None}, "give the seconds of a --window"),
        ({"streams": 5}, "more than there are --slots"),
        ({"warmup_s": 6.0}, "must be below the --window"),
        ({"speculation": msgspec.UNSET, "policy": "static:3"}, "say with --acceptance"),
    ):
        with pytest.raises(ConfigError, match=told):
            check([other(cell, **changes)])
    with pytest.raises(ValueError, match="give off, adaptive"):
        Speculation(mode="fixed:9")


def test_acceptance_is_one_probability_or_two() -> None:
    assert parse_acceptance("0.6-0.8") == (0.6, 0.8) and parse_acceptance("0.7") == (0.7, 0.7)
    with pytest.raises(ValueError, match="give two probabilities"):
        parse_acceptance("much")


def test_a_draft_costs_what_its_table_says(tmp_path: Path) -> None:
    costs, draft = tmp_path / "costs.json", tmp_path / "draft.json"
    costs.write_text(json.dumps(TABLE), encoding="utf-8")
    draft.write_text(json.dumps({"decode": {"1": 0.5, "3": 1.5}}), encoding="utf-8")
    assert load_costs(costs, draft).speculation(2, 1, 4) == 4.0


def test_the_command_runs_every_policy_on_every_number_of_streams(
    cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--trace", CLOSED_LOOP, "--costs", cell.costs, "--streams", "1,2", "--window", "2", "--slots", "4")
    more = ("--policy", "static:1", "--policy", "static:3", "--acceptance", "0.5-0.9", "--jobs", "1")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *options, *more])
    assert ended.value.code == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.strip().startswith("static")]
    assert rows == [["static:1", "1"], ["static:3", "1"], ["static:1", "2"], ["static:3", "2"]]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--streams", "1,x"), "--streams 1,x: give one whole number or several"),
        (("--streams", "1", "--speculative", "wide"), "--speculative wide: give off, adaptive"),
        (("--streams", "1", "--acceptance", "7"), "Expected `float` <= 1"),
        ((), "one needs the other"),
    ],
)
def test_what_is_wrong_is_said(
    cell: Cell, more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--trace", CLOSED_LOOP, "--costs", cell.costs, "--window", "2", *more])
    assert ended.value.code == 2
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_shapes_are_bounded_by_the_envelope() -> None:
    shapes = speculative_shapes((1, 2, 4), (2, 4), envelope=8, ragged=True)
    assert [shape.name.partition("/")[2] for shape in shapes] == [
        *("b1d0w1", "b2d0w1", "b4d0w1", "b1d1w2", "b1d3w4", "b2d1w2", "b2d3w4", "b4d1w2"),
        *("b2d3w4p4", "b4d3w4p8"),
    ]
    copies = speculative_shapes((1, 2, 4), (1, 4), source=Source.COPY, envelope=8)
    assert [shape.name.partition("/")[2] for shape in copies] == ["b1c3w4", "b2c3w4"]
