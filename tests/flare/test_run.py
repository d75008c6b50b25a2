"""`flare run` that cannot serve: one sentence and status 2, wherever on the way it is found out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flare.test_model import write_directory

PROGRAM = """
import sys
from flare import device, run
from flare.device_choice import choose_device
from flare.graphs.cuda.failures import out_of_memory
from flare.graphs.weights.errors import ModelError

ERRORS = {"weights": ModelError("a tensor cannot be read; fetch it again"), "memory": out_of_memory("loading")}

class Device(device.CpuDevice):
    def prepare(self, catalog, progress):
        raise ERRORS[sys.argv[2]]

device.CpuDevice = Device
sys.exit(run.serve(choose_device(None, {"device": "cpu", "model": sys.argv[1], "port": 0, "eager": True})))
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("weights", "a tensor cannot be read; fetch it again"),
        ("memory", "the GPU is out of memory while loading; lower --gpu-memory-utilization"),
    ],
)
def test_what_fails_while_graphs_are_prepared(fault: str, told: str, tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), fault]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ})
    assert (ended.returncode, ended.stdout) == (2, "")
    chosen, said = ended.stderr.splitlines()
    assert "device.chosen" in chosen and said.startswith(f"flare run: {told}")
