"""The conformance suites on the CPU device, with a tiny random model: compiled in the default formats, and as torch
runs the exact ones."""

from __future__ import annotations

from functools import cache, partial
from typing import Literal

import pytest
import torch

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.device import Device
from flare.graphs.models.source import Int4Groups
from flare.machines.graph import GraphKind, GraphShape, rectangular
from tests.graphs.conformance import DeviceConformance
from tests.graphs.conformance_mixed import MixedConformance
from tests.graphs.host import DECODE
from tests.tiny_models import tiny_config, tiny_tensors


@cache
def tensors() -> dict[str, torch.Tensor]:
    """The model, made once."""
    return {name: tensor / 2 for name, tensor in tiny_tensors(tiny_config()).items()}


class TinyWeights:
    """A weight source over tensors in memory."""

    def tensor(self, name: str) -> torch.Tensor:
        """A float32 tensor by its Hugging Face name."""
        return tensors()[name]

    def int4_group32(self, name: str) -> Int4Groups | None:
        """No tensor is stored in four bits."""
        return None


def make_cpu(dtype: Literal["auto", "float32"], eager: bool) -> Device:
    """A device of four slots and 8 MiB of pages."""
    return CpuDevice(
        tiny_config(),
        TinyWeights(),
        request_slots=4,
        max_model_len=256,
        kv_bytes=8 << 20,
        dtype=dtype,
        threads=1,
        eager=eager,
        cache_dir=cache_dir(),
        warn=print,
    )


class TestCompiled(DeviceConformance):
    """Every check, on the device as it serves by default."""

    make = partial(make_cpu, "auto", False)


class TestEager(DeviceConformance):
    """Every check, on the reference program."""

    make = partial(make_cpu, "float32", True)


class TestCompiledMixed(MixedConformance):
    """Mixed graphs and packed prompts, compiled."""

    make = partial(make_cpu, "auto", False)


class TestEagerMixed(MixedConformance):
    """Mixed graphs and packed prompts, on the reference program."""

    make = partial(make_cpu, "float32", True)


@pytest.mark.parametrize(
    "shape",
    [
        GraphShape(GraphKind.SNAPSHOT, 1),
        rectangular(GraphKind.SPECULATIVE, 2, 3),
        rectangular(GraphKind.MIXED, 2, 1, 64, 1),
    ],
)
def test_a_graph_without_a_program_is_refused_by_name(shape: GraphShape) -> None:
    device = make_cpu("float32", True)
    with pytest.raises(ValueError, match=f"no program for {shape.name}"):
        device.prepare([DECODE[1], shape], lambda *_: None)
    device.close()
