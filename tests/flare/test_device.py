"""Making a device from settings: each kind, and what each does not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.config.devices import DEVICE_DEFAULTS
from flare.config.loader import load_settings
from flare.config.schema import ConfigError, Settings
from flare.device import SIM_ANSWER, SIM_FRAME_NS, SIM_ROW_NS, make_device
from flare.graph_plan import read_plan
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.failures import OutOfMemory
from flare.graphs.device import Device
from flare.graphs.sim.paced import PacedDevice
from flare.machines.graph import GraphKind, GraphShape
from flare.model import Model, open_model
from tests.flare.test_model import write_directory
from tests.graphs.cuda.fake_runtime import FakeRuntime
from tools.gpu.player import playing, prompt_of

COSTS = {
    "decode": {"1": 2.0, "64": 4.0},
    "prefill": {"16": 3.0, "512": 6.0},
    "mixed": {"1": {"64": 4.0}, "64": {"64": 5.0, "512": 9.0}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of 512 tokens of context."""
    path = tmp_path_factory.mktemp("device") / "model"
    write_directory(path)
    return open_model(str(path), lambda *_: None)


def settings_of(device: str, **given: object) -> Settings:
    return load_settings(None, {"device": device, "model": "m", **given}, {}, DEVICE_DEFAULTS[device])


def make(model: Model, settings: Settings, runtime: FakeRuntime | None = None) -> Device:
    return make_device(settings, read_plan(settings)[1], model, None, model.context_length, runtime)


def test_each_device_is_of_its_kind(model: Model) -> None:
    runtime = FakeRuntime()
    made = (
        make(model, settings_of("cpu", kv_memory="8MiB")),
        make(model, settings_of("cuda", kv_memory="8MiB"), runtime),
        make(model, settings_of("sim")),
    )
    assert [type(device) for device in made] == [CpuDevice, CudaDevice, PacedDevice]
    for device in made:
        assert device.pages * device.page_tokens >= model.context_length
        device.close()


def test_what_a_device_does_not_take_is_refused_by_the_settings_name(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: float16 is for --device cuda"):
        make(model, settings_of("cpu", dtype="float16"))
    with pytest.raises(ConfigError, match="kv_memory: 1024 holds"):
        make(model, settings_of("cuda", kv_memory="1KiB"), FakeRuntime())
    with pytest.raises(OutOfMemory, match="lower --gpu-memory-utilization"):
        make(model, settings_of("cuda"), FakeRuntime(free=1 << 20))
    with pytest.raises(ConfigError, match=r"sim_costs: .*cannot be read"):
        make(model, settings_of("sim", sim_costs=str(tmp_path / "none.json")))


@pytest.mark.parametrize("told", [True, False])
def test_a_simulated_device_takes_what_its_costs_say(told: bool, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    settings = settings_of("sim", sim_costs=str(path)) if told else settings_of("sim")
    shape = GraphShape(GraphKind.PREFILL, 4, 512)
    device = make(model, settings)
    with playing(device, read_plan(settings)[1], 512) as player:
        text = player.admit(0, prompt_of(40, 0, 250), limit=300, stop=(model.tokenizer.eos_ids[0],))
        took_ns = player.play(shape, [(text, text.chunk(512))]).device_ns
        least_ns = 6_000_000 if told else SIM_FRAME_NS + 512 * SIM_ROW_NS
        assert took_ns >= least_ns
        for _ in range(SIM_ANSWER[1]):
            if text.ended:
                break
            player.play(GraphShape(GraphKind.DECODE, 1), [(text, text.turn())])
        assert text.ended and SIM_ANSWER[0] < len(text.tokens) <= SIM_ANSWER[1]
