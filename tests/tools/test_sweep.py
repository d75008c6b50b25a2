"""The comparison: where a server is saturated, what is compared, and the document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from flare.simulate.cells import Cell, Result
from flare.simulate.figures import Figures, Slo, Timeline
from tools import sweep
from tools.sweep import Load, Sweep, policies_of, shown, summary, write

LOAD = Load("trace.csv", "graph_costs_h100_tiny.json", Slo())


def result(policy: str, speed: float, good: float) -> Result:
    line = Timeline(1.0, (1.0,), (0,), (0,), ())
    figures = Figures(9, 0, 0, 1.0, 1.0, 100.0, 5.0, 9.0, 5.0, 9.0, 10.0, good, None, line)
    return Result(policy, Cell(policy=policy, trace="", costs="", speed=speed), figures, 1.0)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n600,5,5\n", encoding="utf-8")
    monkeypatch.setattr(sweep, "TRACES", ("trace.csv",))
    return Sweep(tmp_path, tmp_path / "results.jsonl", 120.0, 1, ())


@pytest.mark.parametrize("capacity", [0.2, 0.9, 1.0, 3.3, 12.0, 40.0])
def test_saturation_is_where_the_rate_stops_rising(
    made: Sweep, monkeypatch: pytest.MonkeyPatch, capacity: float
) -> None:
    rates: Callable[[Sweep, Load, float], float] = lambda _self, _load, speed: 100 * min(speed, capacity)  # noqa: E731
    monkeypatch.setattr(Sweep, "rate", rates)
    assert 0.97 * capacity <= made.saturation(LOAD) <= 1.06 * capacity


def test_a_window_ends_with_its_trace(made: Sweep) -> None:
    assert made.cell(LOAD, "vtc", 2.0).window_s == 120.0
    assert made.cell(LOAD, "vtc", 10.0).window_s == 60.0


def test_every_rule_is_compared_with_each_of_its_budgets() -> None:
    policies = policies_of(["balanced"])
    assert policies[:3] == ["vllm:512", "vllm:1024", "vllm:2048"] and policies[-1] == "balanced"
    assert {"sarathi:512", "vtc", "fastserve", "prefill-first:8192"} < set(policies)


def test_the_best_budget_stands_for_a_rule() -> None:
    goods = {"vllm:512": 0.5, "vllm:1024": 0.7, "vllm:2048": 0.6, "sarathi:512": 0.9, "sarathi:1024": 0.8, "vtc": 0.1}
    best = shown([result(policy, 1.0, good) for policy, good in goods.items()])
    assert [one.cell.policy for one in best] == ["vllm:1024", "sarathi:512", "vtc"]


def test_the_summary_averages_and_says_how_far_behind() -> None:
    cells = [(str(good), [result("a", 1.0, good), result("b", 1.0, 1 - good)]) for good in (0.2, 0.9)]
    lines = summary(cells, ["a", "b"]).splitlines()
    assert lines[0] == "| trace, device, load | a | b |"
    assert lines[-2] == "| **average** | **55.0** | **45.0** |"
    assert lines[-1] == "| furthest behind the cell's best | 60.0 | 80.0 |"


def test_the_document_and_its_plots(tmp_path: Path) -> None:
    policies = policies_of(["balanced"])
    loads = [[result(policy, share, share / 2) for policy in policies] for share in sweep.LOADS]
    write(tmp_path, [(LOAD, 3.3, loads)], policies)
    text = (tmp_path / "simulation_results.md").read_text(encoding="utf-8")
    assert "Saturated at 3.3 times" in text and "(plots/trace_h100.svg)" in text
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["trace_h100.svg"]
    assert text.count("\n| balanced | ") == 3


def test_results_survive_their_file(tmp_path: Path) -> None:
    one = result("vtc", 1.0, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Result) == one
