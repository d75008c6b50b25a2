"""`flare simulate` as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flare.cli import main
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
    command = [sys.executable, "-m", "flare", "simulate", *files, *policies, *outputs]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        (("--trace", "nowhere.csv"), "nowhere.csv"),
        (("--slo", "ttft=x"), "--slo: 'ttft=x': give milliseconds"),
        (("--speed", "0"), "--speed: must be above 0"),
        (("--recipe", "gpu"), "gpu: neither a file nor one of the recipes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    files: tuple[str, ...], more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *files, *more])
    assert ended.value.code == 2
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
