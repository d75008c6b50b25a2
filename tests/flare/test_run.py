"""`flare run` that cannot serve: one sentence and status 2, wherever on the way it is found out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.flare.test_model import write_directory

PROGRAM = """
import sys
from flare import run
from flare.graphs.weights.errors import ModelError

class Device(run.CpuDevice):
    def prepare(self, catalog, progress):
        raise ModelError("a tensor cannot be read; fetch it again")

run.CpuDevice = Device
sys.exit(run.serve(None, {"model": sys.argv[1], "port": 0, "eager": True}))
"""


def test_weights_that_fail_while_they_are_prepared(tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == ["flare run: a tensor cannot be read; fetch it again"]
