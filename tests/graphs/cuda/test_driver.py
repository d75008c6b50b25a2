"""Opening a card where something is missing, and what the driver's calls make of errors: over a stand-in for
cuda-python, since this needs neither that nor a card."""

from __future__ import annotations

import importlib
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flare.graphs.cuda import driver
from flare.graphs.cuda.driver import DriverRuntime, open_runtime
from flare.graphs.cuda.failures import LOST, NoDevice
from flare.graphs.cuda.runtime import CudaError

NUMBERS = {name: number for number, name in enumerate(["cudaSuccess", "cudaErrorMemoryAllocation", *sorted(LOST)])}
ERRORS = Enum("ERRORS", NUMBERS)  # type: ignore[misc]


class Bindings:
    """Answers as cuda-python does: tuples that begin with an error."""

    cudaError_t = ERRORS  # noqa: N815 - its name there

    def __init__(self) -> None:
        self.version, self.own_version = 13000, 13050
        self.error: Any = ERRORS(0)
        self.called: list[tuple[Any, ...]] = []

    def cudaDriverGetVersion(self) -> tuple[Any, int]:  # noqa: N802
        return self.error, self.version

    def cudaRuntimeGetVersion(self) -> tuple[Any, int]:  # noqa: N802
        return ERRORS(0), self.own_version

    def cudaGetErrorString(self, error: Any) -> tuple[Any, bytes]:  # noqa: N802
        return ERRORS(0), b"in words"

    def cudaEventSynchronize(self, event: Any) -> tuple[Any]:  # noqa: N802
        self.called.append(("wait", event))
        return (self.error,)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    """A torch with CUDA 13.0 and cuda-python, a driver, and one card."""
    made = Bindings()
    real = importlib.import_module
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        importlib, "import_module", lambda name: made if name == "cuda.bindings.runtime" else real(name)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_120"])
    monkeypatch.setattr(driver, "DriverRuntime", lambda *given: given)
    return made


def refused() -> NoDevice:
    """Why no card can be opened."""
    with pytest.raises(NoDevice) as error:
        open_runtime()
    assert str(error.value) == f"{error.value.cause}; {error.value.remedy}"
    return error.value


def test_a_card_is_opened(bindings: Bindings) -> None:
    assert open_runtime() == (bindings, (13, 0))  # type: ignore[comparison-overlap]


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    error = refused()
    assert "built without CUDA" in error.cause and "pip install torch" in error.remedy and not error.found


def test_no_cuda_python(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    error = refused()
    assert "cuda-python is not installed" in error.cause and "flare-serve[cuda]" in error.remedy


@pytest.mark.parametrize("says", ["nothing", "an error"])
def test_no_driver(bindings: Bindings, says: str) -> None:
    bindings.version = 0
    bindings.error = ERRORS["cudaErrorUnknown" if says == "an error" else "cudaSuccess"]
    assert "no NVIDIA driver" in refused().cause


def test_a_driver_that_is_too_old(bindings: Bindings) -> None:
    bindings.version = 12090
    error = refused()
    assert "CUDA 12.9 at most, and torch for CUDA 13.0" in error.cause and "update the driver" in error.remedy
    assert error.found


def test_a_cuda_python_that_is_too_new(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    bindings.version = 12090
    error = refused()
    assert "CUDA 12.9, and cuda-python for 13.5" in error.cause and "cuda-bindings<13" in error.remedy


def test_no_card(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refused()
    assert "finds no GPU" in error.cause and "CUDA_VISIBLE_DEVICES" in error.remedy


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 9), True), ((9, 0), True), ((7, 5), False), ((10, 0), False), ((12, 1), True)],
)
def test_architectures(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], runs: bool
) -> None:
    """Code for sm_80 runs on 8.9 too; what is to be compiled for 12.0 runs on all that came later."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    if runs:
        open_runtime()
        return
    error = refused()
    assert f"sm_{capability[0]}{capability[1]}" in error.cause and error.found


def test_a_card_that_does_not_start(bindings: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore of this")

    monkeypatch.setattr(driver, "DriverRuntime", broken)
    error = refused()
    assert "busy or unavailable" in error.cause and "nvidia-smi" in error.remedy and error.found


@pytest.mark.parametrize("name", ["cudaErrorMemoryAllocation", *sorted(LOST)])
def test_an_error_says_whether_the_card_is_lost(name: str) -> None:
    bindings = Bindings()
    bindings.error = ERRORS[name]
    runtime = DriverRuntime.__new__(DriverRuntime)
    runtime._cudart = bindings
    with pytest.raises(CudaError, match=f"cudaEventSynchronize: {name}: in words") as error:
        runtime.wait(SimpleNamespace())
    assert (error.value.lost, error.value.memory) == (name in LOST, name == "cudaErrorMemoryAllocation")
