"""The check of a GPU on the fake runtime, with next to nothing to do: every section runs, and its table can be read."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
import typer
from rich.console import Console

from flare.graphs.cuda import failures
from flare.graphs.cuda.runtime import Runtime
from flare.graphs.sim.costs import load_costs
from flare.machines.graph import GraphKind, GraphShape
from tests.graphs.cuda.devices import PlainDevice
from tests.graphs.cuda.fake_runtime import FakeRuntime
from tools import gpu_check
from tools.gpu.conformance import run_suites
from tools.gpu.logits import PROMPT
from tools.gpu.mixed import Load
from tools.gpu.models import RandomWeights, Subject, on_cpu, tiny
from tools.gpu.player import playing, prompt_of
from tools.gpu.report import Finding, guarded, show
from tools.gpu.sizes import Sizes
from tools.gpu_check import Check, Result

TIMED = ("streams", "idle", "capture")
"""Sections whose limits are a GPU's."""

RECIPE = """
name = "small"
prefill_tokens = [16, 64]
scored_prefill_tokens = [16]
decode_batches = [1, 2]
mixed_batches = [2]
mixed_prefill_tokens = [64]
copy_widths = [2]
"""


def fake() -> Runtime:
    return FakeRuntime(checks=False, slowest_s=0.0)


def subject(slots: int = 4) -> Subject:
    config = tiny("llama")
    return Subject("tiny", config, RandomWeights(config, torch.device("cpu")), slots, 256)


def texts() -> dict[str, dict[str, list[float]]]:
    """What the CPU writes, as if no two logits were ever near; and a text that nobody writes."""
    made, decode = {}, GraphShape(GraphKind.DECODE, 1)
    with playing(on_cpu(subject()), (PROMPT, decode), 256) as player:
        for seed in range(3):
            text = player.admit(0, prompt_of(10 + seed, seed, 320), limit=6)
            player.read([text], PROMPT)
            while not text.ended:
                player.play(decode, [(text, text.turn())])
            made[f"text {seed}"] = {"ids": text.prompt.tolist(), "out": text.tokens, "gaps": [9.0] * 6}
    return {**made, "nobody's": {**made["text 0"], "out": [0] * 6}}


@dataclass(frozen=True)
class Checked:
    """What one check left."""

    sizes: Sizes
    status: int
    printed: str
    result: Result
    costs: Path


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """The whole command, on the fake runtime."""
    folder = tmp_path_factory.mktemp("check")
    recipe, references = folder / "small.toml", folder / "texts.json"
    recipe.write_text(RECIPE)
    references.write_text(json.dumps(texts()))
    sizes = Sizes(
        large=tiny("llama"),
        dtype="float32",
        slots=2,
        max_model_len=256,
        max_prefill_tokens=64,
        context=32,
        frames=8,
        repeats=2,
        families=("qwen3",),
        load=Load(clients=2, requests=4, prompt=(8, 40), output=(2, 5)),
        recipe=str(recipe),
        references=references,
        kind=PlainDevice,
    )
    found, costs, printed = folder / "found.json", folder / "costs.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_check, "open_runtime", fake)
        patch.setattr(gpu_check, "Sizes", lambda: sizes)
        patch.setattr(gpu_check, "default_subject", lambda _: subject())
        patch.setattr(gpu_check, "run_suites", lambda: [Finding("conformance", "suites", "not here")])
        patch.setattr("sys.stdout", printed)
        with pytest.raises(typer.Exit) as ended:
            gpu_check.main(None, found, costs)
    result = msgspec.json.decode(found.read_bytes(), type=Result)
    return Checked(sizes, ended.value.exit_code, printed.getvalue(), result, costs)


def test_every_section_runs(checked: Checked) -> None:
    found = checked.result.findings
    assert not [each for each in found if each.what == "does not run"]
    took = [each.section for each in found if each.what == "took"]
    assert set(took) >= {"logits", "capture", "costs", "latency", "mixed", "streams", "large model, eager"}
    assert "not here" in {each.value for each in found}


def test_a_row_that_failed_is_printed_and_makes_the_status_1(checked: Checked) -> None:
    assert checked.status == 1
    assert "FAILED" in checked.printed and "a fake card, sm_90, 16 GiB" in checked.printed


def test_what_is_no_matter_of_speed_passes(checked: Checked) -> None:
    judged = [each for each in checked.result.findings if each.limit and each.section not in (*TIMED, "greedy texts")]
    assert not [each for each in judged if not each.ok]
    assert {each.section for each in judged} == {"logits", "mixed"}


def test_a_text_that_differs_is_named(checked: Checked) -> None:
    exact = next(each for each in checked.result.findings if each.what == "tiny float32")
    assert (exact.value, exact.ok) == ('3 of 4 texts, 24 tokens; not "nobody\'s"', False)


def test_the_table_of_costs_is_one_that_a_simulation_reads(checked: Checked) -> None:
    load_costs(checked.costs).check(checked.sizes.catalog())
    graphs = json.loads(checked.costs.read_bytes())["graphs"]
    assert set(graphs) == {shape.name for shape in checked.sizes.catalog()}


def test_no_section_begins_when_the_time_is_over() -> None:
    check = Check(fake, Sizes(time_s=0.0), Console(file=io.StringIO()))
    check.run(subject, list)
    assert {(each.what, each.ok) for each in check.result.findings} == {("not begun", False)}


def test_without_a_card_the_reason_is_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> Runtime:
        raise failures.no_driver()

    monkeypatch.setattr(gpu_check, "open_runtime", none)
    with pytest.raises(typer.Exit) as ended:
        gpu_check.main()
    assert ended.value.exit_code == 2
    assert "no NVIDIA driver answers" in capsys.readouterr().out


def test_a_section_that_breaks_is_a_row_that_failed() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("logits", "first", "1")
        raise RuntimeError("a card was lost")

    file = io.StringIO()
    found = guarded("logits", broken, Console(file=io.StringIO()))
    show(Console(file=file, width=120), found)
    assert [each.ok for each in found] == [True, False, True]
    assert "FAILED" in file.getvalue() and "a card was lost" in file.getvalue()


def test_suites_are_counted_and_what_did_not_pass_is_named(tmp_path: Path) -> None:
    suite = tmp_path / "test_three.py"
    suite.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no card')\n"
    )
    found = list(run_suites([str(suite)], {}))
    assert (found[0].value, found[0].ok) == ("1 of 3 tests passed", False)
    assert sorted(each.what for each in found[1:]) == ["test_b", "test_c"]
