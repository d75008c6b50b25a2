"""`flare bench` against a scripted server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare.bench.runs import SUITE, Case
from flare.cli import main
from tests.flare.sse_server import Script, count_tokens, scripted_server


def run_bench(script: Script, *arguments: str) -> int:
    with scripted_server(script) as url, pytest.raises(SystemExit) as ended:
        main(["bench", "--url", f"{url}/v1/", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def results_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_a_closed_loop_is_measured_after_a_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    path = tmp_path / "results.json"
    options = ("--streams", "3", "--requests", "9", "--prompt-tokens", "20", "--output-tokens", "4", "--repeat", "2")
    assert run_bench(script, *options, "--json", str(path)) == 0
    (result,) = results_of(path)
    assert len(result["runs"]) == 2
    assert result["median"] in result["runs"]
    for run in result["runs"]:
        assert (run["requests"], run["failed"], run["output_tokens"]) == (9, 0, 36)
        assert 9 * 19 <= run["prompt_tokens"] <= 9 * 20
        assert run["counted_by_usage"]
    assert len(script.requests) == 6 + 2 * 9
    assert script.active_max <= 3
    assert len({request["prompt"] for request in script.requests}) == len(script.requests)
    assert "3 streams, 20-token prompts" in capsys.readouterr().out


def test_an_open_loop_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    options = ("--rate", "500", "--requests", "12", "--output-tokens", "3")
    assert run_bench(Script(usage=False), *options, "--json", str(path)) == 0
    (result,) = results_of(path)
    assert result["case"]["kind"] == "open"
    assert (result["median"]["requests"], result["median"]["output_tokens"]) == (12, 36)
    assert not result["median"]["counted_by_usage"]


def test_mixed_load_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    path = tmp_path / "results.json"
    options = ("--mixed", "--long-count", "2", "--every", "0.2", "--alone", "0.5", "--output-tokens", "8")
    assert run_bench(script, *options, "--long-prompt-tokens", "90", "--json", str(path)) == 0
    (result,) = results_of(path)
    median = result["median"]
    assert (median["long_requests"], median["failed"]) == (2, 0)
    assert median["alone_tokens_per_s"] > 0
    assert median["stream_tokens_per_s"] > 0
    assert median["long_first_token_ms"]["p50"] > 0
    assert sum(1 for request in script.requests if count_tokens(request["prompt"]) in (89, 90)) == 1 + 2
    assert "4 streams, 90-token prompt every 0.2 s" in capsys.readouterr().out


def test_failures_are_shown_and_make_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(Script(broken_status=503), "--requests", "2") == 2
    assert "every request of the warm-up failed: HTTP 503" in capsys.readouterr().err.replace("\n", " ")


def test_a_server_without_a_tokenizer_is_measured_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(tokenizer=False)
    assert run_bench(script, "--requests", "2", "--prompt-tokens", "10", "--output-tokens", "2") == 0
    assert "no /tokenize" in capsys.readouterr().out
    assert {len(request["prompt"].split()) for request in script.requests} == {10}


@pytest.mark.parametrize(
    "arguments",
    [["--url", "nonsense"], ["--mixed", "--rate", "3"], ["--streams", "0"], ["--json", "/nowhere/out.json"]],
)
def test_bad_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2


def test_the_suite_is_the_table_of_the_documentation() -> None:
    assert [case.name for case in SUITE] == [
        "1 stream, 64-token prompts",
        "4 streams, 64-token prompts",
        "8 streams, 64-token prompts",
        "16 streams, 64-token prompts",
        "8 streams, 512-token prompts",
        "1 stream, 512-token prompts",
        "4 streams, 1500-token prompt every 3 s",
    ]
    assert Case(streams=16).count == 64
    assert Case(streams=1).count == 8
