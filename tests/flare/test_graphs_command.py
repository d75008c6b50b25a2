"""`flare graphs`: a running server's graphs, and a plan's."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flare.cli import main
from flare.graphs_command import show_plan
from tests.machines.build import decode_shape, prefill_shape

from .sse_server import Script, scripted_server

STATUS: dict[str, object] = {
    "graph": "decode/b4",
    "kind": "decode",
    "batch": 4,
    "prefill_tokens": 0,
    "duration_ms": 8.254,
    "age_s": 31.2,
    "stale": True,
    "executions": 1234,
}
UNKNOWN: dict[str, object] = {
    **STATUS,
    "graph": "prefill/t512",
    "kind": "prefill",
    "prefill_tokens": 512,
    "duration_ms": None,
    "age_s": None,
    "stale": False,
    "executions": 0,
}


def test_a_running_servers_graphs_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Script(graphs=[STATUS, UNKNOWN])) as url, pytest.raises(SystemExit) as ended:
        main(["graphs", "--url", url])
    assert ended.value.code == 0
    known, unknown = (line.split() for line in capsys.readouterr().out.splitlines() if "/" in line)
    assert known == ["decode/b4", "4", "-", "8.25", "31", "s", "ago,", "stale", "1234"]
    assert unknown == ["prefill/t512", "4", "512", "unknown", "never", "0"]


@pytest.mark.parametrize(
    ("script", "told"), [(Script(api_key="k3y"), "--api-key"), (Script(graphs=[{"graph": 1}]), "error:")]
)
def test_an_answer_that_is_none_is_told(script: Script, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(script) as url, pytest.raises(SystemExit) as ended:
        main(["graphs", "--url", url])
    assert ended.value.code == 1
    assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["graphs", "--url", "http://127.0.0.1:1"])
    assert ended.value.code == 1
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_a_plan_has_its_graphs_and_its_memory() -> None:
    console = Console(file=io.StringIO(), width=100)
    show_plan(console, [decode_shape(1), prefill_shape(64)], [("weights", 3 << 20), ("KV cache, 7 pages", 1 << 20)])
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["decode/b1", "1", "-"] in lines
    assert ["prefill/t64", "1", "64"] in lines
    assert ["weights", "3.0", "MiB"] in lines
    assert ["total", "4.0", "MiB"] in lines
    assert ["2", "graphs,", "the", "largest", "of", "64", "packed", "rows."] in lines
