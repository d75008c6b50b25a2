"""`flare simulate` as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flare.cli import main
from flare.simulate import command
from tests.flare.simulate.worlds import costs_file

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,20,5\n0.1,30,6\n0.2,70,3\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE, encoding="utf-8")
    return ("--trace", str(trace), "--costs", str(costs_file(tmp_path)), "--slots", "4", "--kv-tokens", "2000")


def test_a_table_of_all_policies_and_speeds(files: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    policies = ("--policy", "vllm:64", "--policy", "balanced", "--speed", "1", "--speed", "2")
    outputs = ("--jobs", "2", "--json", str(out), "--plots", str(tmp_path / "plots"))
    line = [sys.executable, "-m", "flare", "simulate", *files, *policies, *outputs]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.strip().startswith(("vllm", "balanced"))]
    assert rows == [["vllm:64", "1"], ["balanced", "1"], ["vllm:64", "2"], ["balanced", "2"]]
    assert [entry["figures"]["unfinished"] for entry in json.loads(out.read_text())] == [0] * 4
    assert (tmp_path / "plots" / "latency.svg").is_file()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--policy", "balance"), "balance: neither a file nor one of the policies"),
        (("--policy", "vllm:x"), "vllm:x: give a whole number"),
        (("--policy", "prefill-first:15"), "prefill-first:15: give a whole number from 16"),
        (("--trace", "nowhere.csv"), "trace nowhere.csv: cannot be read: No such file"),
        (("--costs", "nowhere.json"), "costs nowhere.json: cannot be read: No such file"),
        (("--slo", "ttft=x"), "--slo: 'ttft=x': give milliseconds"),
        (("--slo", "ttft=1,ttft=2"), "--slo: ttft is given twice"),
        (("--speed", "0"), "--speed: expected float of at least 1e-06"),
        (("--speed", "nan"), "--speed: nan is not a finite number"),
        (("--speed", "inf"), "--speed: inf is not a finite number"),
        (("--window", "inf"), "--window: inf is not a finite number"),
        (("--window", "1e300"), "--window: expected float of at most"),
        (("--kv-tokens", "1000000000000"), "--kv-tokens: expected int of at most"),
        (("--json", "nowhere/x.json"), "--json: cannot write nowhere/x.json"),
        (("--results", "."), "--results: cannot write .: Is a directory"),
        (("--plots", "/dev/null"), "--plots: cannot write /dev/null"),
        (("--recipe", "gpu"), "gpu: neither a file nor one of the recipes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    files: tuple[str, ...],
    more: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "run_cells", None)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *files, *more])
    assert ended.value.code == 2
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
