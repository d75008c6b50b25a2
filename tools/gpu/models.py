"""The models that are run on a GPU: tiny ones with random weights, one of the shape of Llama-3-8B, and the default one.

Owns the random weights and the making of devices. Does not own programs. Surprising rule: random weights are drawn
where they are used, by the name of the tensor, so that sixteen gigabytes of them cost seconds and are the same twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flare.cache import cache_dir
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.plan import CudaPlan, DType, plan_memory, torch_dtype
from flare.graphs.cuda.runtime import Runtime
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import DraftModel
from flare.graphs.models.source import Int4Groups, WeightSource
from flare.graphs.weights.layout import tensor_shapes
from flare.machines.graph import GraphShape

OpenRuntime = Callable[[], Runtime]
"""A runtime for one device, which closes it."""

LLAMA_3_8B = ModelConfig(
    architecture="llama",
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocab=128_256,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)


def tiny(architecture: str) -> ModelConfig:
    """Two layers of a family."""
    return ModelConfig(
        architecture=architecture,
        hidden=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=512,
        vocab=320,
        max_positions=512,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )


@dataclass(frozen=True)
class RandomWeights:
    """Normal weights, narrower the wider the layer; gains of norms are one."""

    config: ModelConfig
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        shape = tensor_shapes(self.config)[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=self.device).mul_(shape[-1] ** -0.5)

    def int4_group32(self, name: str) -> Int4Groups | None:
        """None is stored in four bits."""
        return None


@dataclass(frozen=True)
class Subject:
    """A model to be run, what drafts for it, and the extents that it is run at."""

    name: str
    config: ModelConfig
    weights: WeightSource
    slots: int
    max_model_len: int
    draft: DraftModel | None = None

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """A cache that holds every slot at full length."""
        pages = -(-self.max_model_len // PAGE_TOKENS) * self.slots
        return pages * page_bytes(self.config, dtype, None if self.draft is None else self.draft.config)


def on_gpu(
    subject: Subject,
    runtime: Runtime,
    catalog: Sequence[GraphShape],
    dtype: DType,
    *,
    eager: bool = False,
    log: Callable[[str], None] = lambda _: None,
    kind: type[CudaDevice] = CudaDevice,
) -> CudaDevice:
    """The device under test."""
    return kind(
        subject.config,
        subject.weights,
        runtime=runtime,
        catalog=catalog,
        request_slots=subject.slots,
        max_model_len=subject.max_model_len,
        gpu_memory_utilization=0.9,
        kv_bytes=subject.kv_bytes(torch_dtype(dtype, runtime.facts())),
        dtype=dtype,
        eager=eager,
        warn=log,
        log=log,
        draft=subject.draft,
    )


def planned(subject: Subject, runtime: Runtime, catalog: Sequence[GraphShape], dtype: DType) -> CudaPlan:
    """What `on_gpu` is going to take."""
    numbers = torch_dtype(dtype, runtime.facts())
    return plan_memory(
        subject.config,
        catalog,
        request_slots=subject.slots,
        max_model_len=subject.max_model_len,
        dtype=numbers,
        kv_bytes=subject.kv_bytes(numbers),
        draft=None if subject.draft is None else subject.draft.config,
    )


def on_cpu(subject: Subject) -> CpuDevice:
    """The exact reference."""
    return CpuDevice(
        subject.config,
        subject.weights,
        request_slots=subject.slots,
        max_model_len=subject.max_model_len,
        kv_bytes=subject.kv_bytes(torch.float32),
        dtype="float32",
        threads=len(os.sched_getaffinity(0)),
        eager=True,
        cache_dir=cache_dir(),
        warn=lambda _: None,
        draft=subject.draft,
    )
