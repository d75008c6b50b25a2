"""Settings that this machine or this server cannot keep: refused by name before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from flare.config.loader import load_recipe
from flare.config.schema import ConfigError, Settings
from flare.graphs.catalog import build_catalog
from flare.model import Model
from flare.run import cpu_device, serve

CATALOG = build_catalog(load_recipe("cpu"), 1, 64)


@pytest.mark.parametrize(
    ("settings", "named"),
    [(Settings(threads=100_000), "threads: 100000 is more than"), (Settings(kv_memory_bytes=1 << 60), "kv_memory")],
)
def test_more_than_the_machine_has(settings: Settings, named: str) -> None:
    """So many threads ended the process, and the pages of so much memory did not fit a list."""
    with pytest.raises(ConfigError, match=named):
        cpu_device(settings, CATALOG, cast(Model, None))


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    assert serve(None, {"trace": str(path)}) == 2
    assert capsys.readouterr().err.startswith(f"flare run: trace: cannot write {path}: No such file")
