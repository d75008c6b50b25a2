"""Which device serves: what was asked for, what is there, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flare import device_choice
from flare.config.devices import DEVICE_DEFAULTS
from flare.config.loader import load_recipe, load_settings
from flare.config.schema import ConfigError
from flare.device_choice import choose_device
from flare.graph_plan import plan_graphs, read_plan
from flare.graphs.cuda import failures
from flare.graphs.cuda.failures import NoDevice
from flare.graphs.cuda.runtime import Runtime
from tests.flare.test_model import write_directory
from tests.graphs.cuda.fake_runtime import FakeRuntime


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """A machine with a card."""
    runtime = FakeRuntime()
    monkeypatch.setattr(device_choice, "open_runtime", lambda: runtime)
    return runtime


def without(monkeypatch: pytest.MonkeyPatch, error: NoDevice, signs: tuple[str, ...] = ()) -> None:
    """A machine whose card cannot be used for this reason."""

    def refuse() -> Runtime:
        raise error

    monkeypatch.setattr(device_choice, "open_runtime", refuse)
    monkeypatch.setattr(device_choice, "_SIGNS_OF_A_GPU", signs)


def test_auto_takes_a_card_where_there_is_one(card: FakeRuntime) -> None:
    choice = choose_device(None, {})
    assert (choice.settings.device, choice.runtime) == ("cuda", card)
    assert choice.reason == "a fake card, driver for CUDA 13.0"
    assert (choice.settings.recipe, choice.settings.max_num_seqs, choice.settings.kv_memory_bytes) == ("cuda", 64, None)


def test_auto_takes_the_cpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, failures.no_torch_cuda("2.13.0+cpu"))
    choice = choose_device(None, {})
    assert (choice.settings.device, choice.reason, choice.runtime) == ("cpu", "no NVIDIA GPU here", None)
    assert choice.settings.recipe == "cpu" and choice.settings.kv_memory_bytes == 3 << 30


@pytest.mark.parametrize("sign", ["the driver", "a device file"])
def test_auto_says_why_a_card_that_is_there_is_not_used(
    sign: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = failures.old_driver((12, 2), "13.0") if sign == "the driver" else failures.no_bindings()
    without(monkeypatch, error, () if sign == "the driver" else (str(tmp_path),))
    choice = choose_device(None, {})
    assert choice.settings.device == "cpu"
    assert choice.reason == f"there is an NVIDIA GPU, but {error.cause}; {error.remedy}"


def test_what_was_asked_for_is_taken_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, failures.no_card())
    for name in ("cpu", "sim"):
        choice = choose_device(None, {"device": name})
        assert (choice.settings.device, choice.reason) == (name, "asked for")
    with pytest.raises(ConfigError, match=r"device: cuda cannot be used: .* finds no GPU; check nvidia-smi"):
        choose_device(None, {"device": "cuda"})


def test_what_is_given_goes_before_the_devices_defaults(card: FakeRuntime, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("max_num_seqs = 3\n")
    settings = choose_device(file, {"recipe": "cpu", "max_prefill_tokens": 512, "kv_memory": "1GiB"}).settings
    assert (settings.max_num_seqs, settings.recipe, settings.kv_memory_bytes) == (3, "cpu", 1 << 30)
    assert settings.mixed_prefill


@pytest.mark.parametrize("device", DEVICE_DEFAULTS)
def test_every_devices_defaults_make_a_catalog(device: str) -> None:
    settings = load_settings(None, {"device": device}, {}, DEVICE_DEFAULTS[device])
    assert settings.max_prefill_tokens in load_recipe(settings.recipe).prefill_tokens
    assert read_plan(settings)[1]


def test_without_a_gpu_cuda_ends_the_command_before_a_model_is_looked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flare", "run", "--device", "cuda", "--model", str(tmp_path / "nowhere")]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (ended.returncode, ended.stdout) == (2, "")
    (said,) = ended.stderr.splitlines()
    assert said.startswith("flare run: device: cuda cannot be used: ") and "; " in said


def test_cuda_is_planned_for_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, failures.no_card())
    write_directory(tmp_path / "model")
    asked: dict[str, object] = {"device": "cuda", "model": str(tmp_path / "model")}
    catalog, memory = plan_graphs(None, asked)
    assert {shape.prefill_tokens for shape in catalog} >= {0, 64, 2048}
    assert [name for name, _ in memory][:2] == ["weights", "KV cache, at least 16 pages"]
    _, memory = plan_graphs(None, {**asked, "kv_memory": "64MiB"})
    assert 0 < dict(memory)[memory[1][0]] <= 64 << 20
    with pytest.raises(ConfigError, match=r"kv_memory: 1024 holds 0 pages"):
        plan_graphs(None, {**asked, "kv_memory": "1KiB"})


def test_a_gpus_memory_is_shared_out_in_a_plan(card: FakeRuntime, tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    half, most = (
        sum(size for _, size in plan_graphs(None, {"model": str(tmp_path / "model"), **given})[1])
        for given in ({"gpu_memory_utilization": 0.5}, {})
    )
    assert 0.45 * card.total < half < 0.5 * card.total
    assert 0.85 * card.total < most < 0.9 * card.total
    card.free = card.total // 4
    with pytest.raises(ConfigError, match="lower --gpu-memory-utilization"):
        plan_graphs(None, {"model": str(tmp_path / "model")})


def test_the_simulated_devices_memory_is_imaginary(tmp_path: Path) -> None:
    write_directory(tmp_path / "model")
    _, memory = plan_graphs(None, {"device": "sim", "model": str(tmp_path / "model")})
    ((name, size),) = memory
    assert name.startswith("imaginary, ") and size == 16 << 30
