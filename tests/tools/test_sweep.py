"""The comparison: where a server is saturated, what is compared, and the document."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.simulate.cells import Cell, Result
from flare.simulate.figures import Figures, Slo, Timeline
from tools import sweep
from tools.sweep import Load, Sweep, knee, policies_of, saturated, shown, summary, write

COSTS = '{"decode": {"1": 9}, "prefill": {"64": 9}, "mixed": {"1": {"64": 9}}}'
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


@pytest.mark.parametrize("capacity", [0.2, 0.9, 3.3, 12.0])
def test_saturation_is_where_the_rate_stops_rising(capacity: float) -> None:
    speeds = [0.25 * 1.15**step for step in range(34)]
    found = knee(speeds, [100 * min(speed, capacity) for speed in speeds])
    assert found == speeds[0] if capacity < speeds[0] else capacity / 1.15 < found < capacity * 1.15


def test_a_rate_that_rests_or_falls_before_its_last_rise_is_not_saturated_there() -> None:
    assert knee([1, 2, 4, 8, 16], [10, 10, 20, 15, 21]) == 4
    assert knee([1, 2, 4, 8, 16], [10, 10, 20, 15, 30]) == 16


def test_without_any_output_nothing_is_divided() -> None:
    assert knee([1, 2, 4], [0, 0, 0]) == 4
    assert knee([1, 2, 4], [0, 5, 5]) == 2


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--only", "nosuch"), "--only nosuch: no trace has that in its name; they are trace.csv"),
        (("--jobs", "0"), "--jobs: must be at least 1"),
        (("--window", "nan"), "--window: nan is not a finite number"),
        (("--window", "0"), "--window: expected float of at least 0.001"),
        (("--policy", "nosuch"), "nosuch: neither a file nor one of the policies"),
        (("--results", "/nowhere/results.jsonl"), "--results: cannot write /nowhere/results.jsonl"),
        (("--traces", "/nowhere"), "trace /nowhere/trace.csv: cannot be read"),
        (("--out", "/dev/null"), "--out: cannot write /dev/null"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    made: Sweep, more: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (made.folder / LOAD.costs).write_text(COSTS, encoding="utf-8")
    monkeypatch.setattr(sweep, "DEVICES", {LOAD.costs: 50.0})
    monkeypatch.setattr(sweep, "run_with_bar", None)
    given = ("sweep", "--traces", str(made.folder), "--results", str(made.folder / "runs.jsonl"), *more)
    monkeypatch.setattr("sys.argv", [*given, *(() if "--out" in more else ("--out", str(made.folder)))])
    with pytest.raises(SystemExit) as ended:
        sweep.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_saturation_is_that_of_the_reference_rule(made: Sweep) -> None:
    (made.folder / LOAD.costs).write_text(COSTS, encoding="utf-8")
    found = made.saturation(LOAD)
    assert found == pytest.approx(25.175)  # two requests saturate nothing
    assert saturated(found).startswith("not saturated at 25.1")
    assert saturated(3.3) == "saturated at 3.3 times the trace's speed"


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
