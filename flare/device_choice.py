"""Which device serves, and the settings that this makes.

Owns the choice by `--device` and what is told of it. Does not own making a device (`device`). Surprising rule: this is
decided, and a GPU opened, before a model is looked for, and before what `flare run` needs is imported: a machine whose
GPU cannot be used says so within seconds, not after minutes of fetching.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flare.config.devices import DEVICE_DEFAULTS
from flare.config.loader import load_settings
from flare.config.schema import ConfigError, Settings
from flare.graphs.cuda.driver import open_runtime
from flare.graphs.cuda.failures import NoDevice
from flare.graphs.cuda.runtime import Runtime

_SIGNS_OF_A_GPU = ("/dev/nvidia0", "/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings of one server, with its device by name and that device's defaults, and the `reason` for it. The
    `runtime` of a GPU is open."""

    settings: Settings
    reason: str
    runtime: Runtime | None = None


def choose_device(config_file: Path | None, overrides: Mapping[str, object], *, planning: bool = False) -> Choice:
    """Settings, and the device that they come to on this machine. `planning`: one that is named need not be there.

    Raises `ConfigError` for settings that are wrong, and for a GPU that is asked for and cannot be used.
    """
    wanted = load_settings(config_file, overrides).device
    name, reason, runtime = wanted, "asked for", None
    if wanted in ("auto", "cuda"):
        try:
            runtime = open_runtime()
            facts = runtime.facts()
            name, reason = "cuda", f"{facts.name}, driver for CUDA {facts.driver[0]}.{facts.driver[1]}"
        except NoDevice as error:
            if wanted == "cuda" and not planning:
                raise ConfigError(f"device: cuda cannot be used: {error}") from None
            if wanted == "auto":
                name, reason = "cpu", _why_not(error)
    settings = load_settings(config_file, overrides, defaults=DEVICE_DEFAULTS[name])
    return Choice(msgspec.structs.replace(settings, device=name), reason, runtime)


def _why_not(error: NoDevice) -> str:
    """Why a machine serves on its CPU: what to do about it matters only where there is a GPU."""
    if error.found or any(Path(sign).exists() for sign in _SIGNS_OF_A_GPU):
        return f"there is an NVIDIA GPU, but {error}"
    return "no NVIDIA GPU here"
