"""`flare tune` as it is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flare.cli import main
from flare.config.loader import load_policy
from tests.flare.simulate.worlds import costs_file

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{0.02 * place},{20 + 37 * (place % 5)},{3 + place % 4}\n" for place in range(60)
)
RECIPE = 'name = "small"\nprefill_tokens = [64]\nscored_prefill_tokens = [64]\ndecode_batches = [1, 4]\n'


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    trace, recipe = tmp_path / "trace.csv", tmp_path / "recipe.toml"
    trace.write_text(TRACE, encoding="utf-8")
    recipe.write_text(RECIPE, encoding="utf-8")
    load = ("--trace", str(trace), "--costs", str(costs_file(tmp_path)), "--recipe", str(recipe), "--slots", "4")
    return [*load, "--kv-tokens", "2000", "--slo", "ttft=60,itl=9"]


def flare(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "flare", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_preset_with_its_evidence_whatever_the_number_of_jobs(options: list[str], tmp_path: Path) -> None:
    search = ("--speed", "1", "--speed", "2", "--half", "first", "--trials", "14", "--seed", "3")
    texts = []
    for jobs in ("1", "2"):
        output = tmp_path / f"tuned_{jobs}.toml"
        shown = flare("tune", *options, *search, "--jobs", jobs, "--output", str(output))
        assert [line.split()[:2] for line in shown.splitlines() if line.strip().startswith(("balanced", "tuned"))] == [
            [name, speed] for name in ("balanced", output.stem) for speed in ("1", "2")
        ]
        texts.append(output.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    for part in ("trace.csv, its first half", "speed 1, 2", "costs.json", "within 60 ms", "seed 3, 14 policies"):
        assert part in texts[0]
    assert load_policy(str(tmp_path / "tuned_1.toml")) != load_policy("balanced")
    judged = flare("simulate", *options, "--half", "second", "--policy", str(tmp_path / "tuned_1.toml"))
    assert " 30 " in judged  # requests


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--base", "balance"), "balance: neither a file nor one of the policies"),
        (("--trace", "nowhere.csv"), "nowhere.csv"),
        (("--costs", "nowhere.json"), "nowhere.json"),
        (("--slo", "ttft=x"), "--slo: 'ttft=x': give milliseconds"),
        (("--speed", "nan"), "--speed: nan is not a finite number"),
        (("--recipe", "gpu"), "gpu: neither a file nor one of the recipes"),
        (("--trials", "1"), "Input should be greater than or equal to 2"),
        (("--half", "third"), "'third' is not one of 'first', 'second'"),
        (("--output", ".toml"), "must be a name that ends in .toml"),
        (("--output", "nowhere/preset.toml"), "--output: cannot write nowhere/preset.toml"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    options: list[str], tmp_path: Path, more: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "preset.toml"
    with pytest.raises(SystemExit) as ended:
        main(["tune", *options, "--output", str(output), *more])
    assert ended.value.code == 2 and not output.exists()
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
