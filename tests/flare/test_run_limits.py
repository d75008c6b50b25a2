"""Settings that this machine or this server cannot keep: refused by name before anything is loaded."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flare.config.loader import load_recipe, load_settings
from flare.config.schema import ConfigError
from flare.device_choice import Choice
from flare.graph_plan import plan_graphs, read_plan
from flare.graphs.catalog import Speculation, build_catalog
from flare.run import serve
from tests.flare.test_model import write_directory


@pytest.mark.parametrize(
    ("overrides", "named"),
    [({"threads": 100_000}, "threads: 100000 is more than"), ({"kv_memory": "1000000TiB"}, "kv_memory")],
)
def test_more_than_the_machine_has(overrides: dict[str, object], named: str) -> None:
    """So many threads ended the process, and the pages of so much memory did not fit a list."""
    with pytest.raises(ConfigError, match=named):
        read_plan(load_settings(None, {"device": "cpu", **overrides}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 512 tokens of context."""
    path = tmp_path_factory.mktemp("plan") / "model"
    write_directory(path)
    return path


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"max_model_len": 513}, "max_model_len: 513 is beyond the model's context of 512"),
        ({"kv_memory": "1KiB"}, "kv_memory: 0 tokens fit, and one request may take 512"),
        ({"scheduler_policy": "none-such"}, "none-such"),
        ({"threads": 100_000}, "threads"),
    ],
)
def test_a_plan_is_refused_where_the_server_would_be(folder: Path, overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan_graphs(None, {"device": "cpu", "model": str(folder), **overrides})


def test_a_plan_has_the_catalog_and_the_memory(folder: Path) -> None:
    asked: dict[str, object] = {"device": "cpu", "model": str(folder), "kv_memory": "1MiB"}
    asked |= {"max_num_seqs": 1, "max_prefill_tokens": 64}
    catalog, memory = plan_graphs(None, asked)
    assert catalog == build_catalog(load_recipe("cpu"), 1, 64, speculation=Speculation(False, None, 64))
    names = [name for name, _ in memory]
    sizes = [size for _, size in memory]
    assert re.fullmatch(r"KV cache, [1-9]\d* pages", names[1])
    assert 0 < sizes[1] <= 1 << 20
    assert (names[0], names[2], min(sizes) > 0) == ("weights", "inputs and outputs", True)


def test_an_address_in_use_is_found_out_before_the_model_is_opened(tmp_path: Path) -> None:
    """In a process of its own, since the server sets up the log of the whole process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "flare", "run", "--port", str(port), "--model", str(tmp_path / "nowhere")]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        f"flare run: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    assert serve(Choice(load_settings(None, {"device": "cpu", "trace": str(path)}), "a test")) == 2
    assert capsys.readouterr().err.startswith(f"flare run: trace: cannot write {path}: No such file")
