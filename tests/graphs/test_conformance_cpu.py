"""The conformance suites on the CPU device, with a tiny random model: compiled in the default formats, and as torch
runs the exact ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest
import torch

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.device import Device
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import Int4Groups
from flare.machines.graph import GraphKind, GraphShape, rectangular
from tests.graphs.conformance import DeviceConformance
from tests.graphs.conformance_mixed import MixedConformance
from tests.graphs.conformance_rounds import RoundConformance, SharingConformance
from tests.graphs.drafts import first_layers, random_head
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


@cache
def head() -> DraftModel:
    """A random draft head for it."""
    with tempfile.TemporaryDirectory() as folder:
        return random_head(Path(folder), tiny_config(), TinyWeights())


def make_cpu(
    dtype: Literal["auto", "float32"],
    eager: bool,
    draft: Callable[[], DraftModel | None] = lambda: None,
    rejects: bool = False,
) -> Device:
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
        warn=print if eager else pytest.fail,  # it would run plain torch
        draft=draft(),
        rejects=rejects,
    )


def cut() -> DraftModel:
    """The model's first layer as its draft."""
    return first_layers(tiny_config(), TinyWeights())


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


class TestCompiledRounds(RoundConformance):
    """Speculative rounds with a head, compiled."""

    make = partial(make_cpu, "auto", False, head)


class TestCompiledRoundsOfAModel(RoundConformance):
    """Speculative rounds with a draft model, compiled."""

    make = partial(make_cpu, "auto", False, cut)


class TestEagerRounds(RoundConformance):
    """Speculative rounds with a head, on the reference program."""

    make = partial(make_cpu, "float32", True, head)


class TestEagerRoundsOfAModel(RoundConformance):
    """Speculative rounds with a draft model, on the reference program."""

    make = partial(make_cpu, "float32", True, cut)


class TestCompiledSharing(SharingConformance):
    """Confidence, and programs that share out their target rows, compiled."""

    make = partial(make_cpu, "auto", False, head)


class TestEagerSharing(SharingConformance):
    """Confidence, and programs that share out their target rows, on the reference program."""

    make = partial(make_cpu, "float32", True, head)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (GraphShape(GraphKind.SNAPSHOT, 1), "no program for snapshot/b1"),
        (rectangular(GraphKind.SPECULATIVE, 2, 3), "speculative/b2d2w3 makes proposals, and there is no draft"),
        (rectangular(GraphKind.MIXED, 2, 3, 64, 1), "mixed/b2t64d2w3 makes proposals, and there is no draft"),
    ],
)
def test_a_graph_without_a_program_is_refused_by_name(shape: GraphShape, reason: str) -> None:
    device = make_cpu("float32", True)
    with pytest.raises(ValueError, match=reason):
        device.prepare([DECODE[1], shape], lambda *_: None)
    device.close()
