"""Cells, the file of results, the command and the plots, on a small trace."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import msgspec
import pytest

from flare.config.schema import ConfigError
from flare.graphs.sim.costs import CostError
from flare.machines.graph import GraphKind
from flare.simulate import pool
from flare.simulate.cells import (
    TWO_CLIENTS,
    Cell,
    Result,
    catalog_of,
    cell_key,
    check,
    jitter,
    requests_of,
    run_cell,
)
from flare.simulate.plots import draw
from flare.simulate.pool import append_result, read_results, run_cells
from flare.simulate.report import cells_of
from flare.simulate.traces import TraceError
from tests.flare.simulate.worlds import costs_file

TRACE = "arrival_s,prompt_tokens,output_tokens,client\n" + "".join(
    f"{0.05 * place},{20 + 7 * (place % 5)},{3 + place % 4},{place % 2}\n" for place in range(30)
)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'name = "small"\nprefill_tokens = [64]\nscored_prefill_tokens = [64]\ndecode_batches = [1, 4]\n',
        encoding="utf-8",
    )
    return Cell(
        policy="vllm:64",
        trace=str(trace),
        costs=str(costs_file(tmp_path)),
        slots=4,
        kv_tokens=1000,
        recipe=str(recipe),
    )


def other(cell: Cell, **changes: object) -> Cell:
    return msgspec.structs.replace(cell, **changes)


@pytest.mark.parametrize("policy", ["vllm:64", "sarathi:64", "prefill-first:64", "vtc", "fastserve", "balanced"])
def test_a_cell_gives_the_same_figures_each_time(cell: Cell, policy: str) -> None:
    cell = other(cell, policy=policy, noise=0.05)
    first, second = run_cell(cell), run_cell(cell)
    assert first.figures == second.figures and first.figures.unfinished == 0
    assert first.figures.requests == 30 and first.figures.service_gap is not None
    if policy != "balanced":  # it learns durations, and noise moves what it learns
        noisier = run_cell(other(cell, seed=1)).figures
        assert noisier.ttft_p50 != first.figures.ttft_p50


def test_a_cell_that_cannot_run_is_found_before_any_runs(cell: Cell, tmp_path: Path) -> None:
    check([cell, other(cell, policy="balanced", speed=3.0)])
    for wrong, error, told in (
        ({"speed": float("nan")}, ConfigError, "--speed: nan is not a finite number"),
        ({"kv_tokens": 10**12}, ConfigError, "--kv-tokens: expected int of at most 100000000"),
        ({"speed": 2e-6, "trace": str(tmp_path / "late.csv")}, TraceError, "--speed 2e-06: puts an arrival beyond"),
        ({"trace": str(tmp_path)}, TraceError, "cannot be read"),
        ({"costs": str(tmp_path)}, CostError, "cannot be read"),
    ):
        (tmp_path / "late.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1e4,1,1\n", encoding="utf-8")
        with pytest.raises(error, match=told):
            check([cell, other(cell, **wrong)])


@pytest.mark.parametrize("recipe", ["sim", "cpu"])
def test_slots_too_few_for_mixed_graphs_have_none(cell: Cell, recipe: str) -> None:
    for slots, mixed in ((1, False), (2, recipe == "cpu"), (3, True), (64, True)):
        catalog = catalog_of(other(cell, recipe=recipe, slots=slots))
        assert any(shape.kind is GraphKind.MIXED for shape in catalog) is mixed
    assert run_cell(other(cell, policy="balanced", recipe=recipe, slots=1)).figures.unfinished == 0


def test_requests_that_come_at_once_have_no_rate(cell: Cell) -> None:
    Path(cell.trace).write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n0,9,9\n", encoding="utf-8")
    assert cells_of(run_cell(cell))[3] == "-"
    assert cells_of(run_cell(other(cell, window_s=9.0)))[3] == "2"


def test_without_drain_the_run_ends_with_the_window(cell: Cell) -> None:
    figures = run_cell(other(cell, window_s=0.5, drain=False, speed=3.0)).figures
    assert figures.unfinished > 0
    assert figures.simulated_s < 0.6
    assert run_cell(other(cell, window_s=0.5, speed=3.0)).figures.unfinished == 0


def test_speed_and_window_choose_the_load(cell: Cell) -> None:
    assert len(requests_of(other(cell, window_s=0.5))) == 10
    assert len(requests_of(other(cell, window_s=0.5, speed=2.0))) == 20
    assert len(requests_of(other(cell, trace=TWO_CLIENTS, window_s=10.0))) == 15 + 30
    assert len(requests_of(other(cell, half="first"))) == len(requests_of(other(cell, half="second"))) == 15


def test_a_key_knows_the_options_and_the_contents_of_files(cell: Cell) -> None:
    keys = {
        cell_key(cell),
        *(cell_key(other(cell, **change)) for change in ({"speed": 2.0}, {"seed": 1}, {"slots": 3})),
    }
    keys.add(cell_key(other(cell, policy="balanced")))
    keys.add(cell_key(other(cell, half="second")))
    Path(cell.trace).write_text(TRACE + "9,9,9,9\n", encoding="utf-8")
    keys.add(cell_key(cell))
    assert len(keys) == 7


def test_a_key_knows_the_coefficients_of_a_policy_file(cell: Cell, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    keys = set()
    for price in (0.1, 0.2):
        policy.write_text(f"decode_age_price = {price}\n", encoding="utf-8")
        keys.add(cell_key(other(cell, policy=str(policy))))
    assert len(keys) == 2
    with pytest.raises(ConfigError, match="neither a file nor one of"):
        cell_key(other(cell, policy="balance"))


def test_noise_has_the_asked_for_spread() -> None:
    factors = [jitter(3, 0.1)(number) for number in range(20_000)]
    mean = sum(factors) / len(factors)
    spread = (sum((factor - mean) ** 2 for factor in factors) / len(factors)) ** 0.5
    assert mean == pytest.approx(1.0, abs=0.01) and spread == pytest.approx(0.1, rel=0.02)
    with pytest.raises(ValueError, match="must be at least 0 and below"):
        jitter(0, 0.6)


def test_finished_cells_are_not_run_again(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, cells, shares = tmp_path / "runs.jsonl", [cell, other(cell, speed=2.0)], list[float]()
    first = run_cells(cells[:1], 1, results, shares.append)
    ran: list[Cell] = []

    def counted(cell: Cell, progress: object) -> Result:
        ran.append(cell)
        return run_cell(cell)

    monkeypatch.setattr(pool, "run_cell", counted)
    both = run_cells(cells, 1, results, shares.append)
    assert ran == cells[1:] and both[0] == first[0]
    assert run_cells(cells, 1, results, shares.append) == both and len(ran) == 1
    assert max(shares) == 2 and shares[-1] == 2


def test_processes_give_what_one_gives(cell: Cell, tmp_path: Path) -> None:
    cells = [other(cell, policy=policy) for policy in ("vtc", "sarathi:64", "balanced")]
    parallel = run_cells(cells, 2, tmp_path / "runs.jsonl", lambda _done: None)
    assert [result.figures for result in parallel] == [run_cell(cell).figures for cell in cells]
    assert set(read_results(tmp_path / "runs.jsonl")) == {cell_key(cell) for cell in cells}


def test_what_still_runs_ends_with_an_interrupted_caller(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, endless, handler = tmp_path / "runs.jsonl", tmp_path / "endless.csv", signal.getsignal(signal.SIGINT)
    os.mkfifo(endless)  # nobody writes it, so who reads it waits for ever
    monkeypatch.setattr(pool, "cell_key", lambda cell: cell.trace)

    def interrupt(done: float) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells([cell, other(cell, trace=str(endless))], 2, results, interrupt)
    assert len(read_results(results)) == 1 and not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_line_that_was_cut_short_is_dropped(cell: Cell, tmp_path: Path) -> None:
    path, result = tmp_path / "runs.jsonl", run_cell(cell)
    append_result(path, result)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    assert list(read_results(path)) == [result.key]
    append_result(path, result)
    assert path.read_bytes() == whole * 2
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(ValueError, match="line 1: not a result"):
        read_results(path)


def test_plots_are_the_same_bytes_each_time(cell: Cell, tmp_path: Path) -> None:
    results = [
        run_cell(other(cell, policy=policy, speed=speed)) for speed in (1.0, 4.0000001) for policy in ("vtc", "vllm:64")
    ]
    names = ["latency.svg", "timeline_1.svg", "timeline_4.0000001.svg"]
    for folder in ("first", "second"):
        assert [path.name for path in draw(results, tmp_path / folder, "svg")] == names
    for name in names:
        drawn = (tmp_path / "first" / name).read_bytes()
        assert drawn == (tmp_path / "second" / name).read_bytes()
        assert b">vtc<" in drawn
    (alone,) = draw(results[:2], tmp_path / "third", "png")
    assert alone.name == "timeline.png" and alone.read_bytes().startswith(b"\x89PNG")
