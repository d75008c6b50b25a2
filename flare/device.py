"""Making the device that serves.

Owns the way from settings to a device that is not yet prepared, and what each device does not take. Does not own the
choice among them (`device_choice`) or any device (`flare.graphs`). Surprising rule: the simulated device is given no
weights. It draws words of the model's vocabulary by chance, at the pace of a table of costs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from flare.config.schema import ConfigError, Settings
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.cpu.plan import DType as CpuDType
from flare.graphs.cpu.plan import kv_dtype
from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.runtime import Runtime
from flare.graphs.device import Device
from flare.graphs.frames import Frame
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.graphs.models.draft import DraftModel
from flare.graphs.programs.extents import packed_rows
from flare.graphs.sim.acceptance import RandomAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.costs import CostError, load_costs
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import Duration
from flare.graphs.sim.tokens import HASH_MASK, TokenSource, mix
from flare.machines.graph import GraphShape

from .cache import cache_dir
from .model import Model
from .tokens.tokenizer import Tokenizer

SIM_FRAME_NS, SIM_ROW_NS = 5_000_000, 20_000
"""What a simulated frame takes without a table of costs, and on top for each packed row of its graph."""

SIM_ACCEPTANCE = 0.7
"""Share of simulated proposals that are right."""

SIM_ANSWER = (24, 256)
"""Tokens of a simulated answer, from the first to below the second."""

_WORD = re.compile(rb" [a-z]+")


def make_device(
    settings: Settings,
    catalog: Sequence[GraphShape],
    model: Model,
    draft: DraftModel | None,
    max_model_len: int,
    runtime: Runtime | None,
) -> Device:
    """The device that `settings` name, by then none but cpu, cuda (whose `runtime` is open) or sim. Raises
    `ConfigError` for settings that it does not take, and `DeviceFailure` for what a GPU does not hold."""
    if runtime is not None:
        return _cuda_device(runtime, settings, catalog, model, draft, max_model_len)
    if settings.device == "sim":
        return _sim_device(settings, catalog, model)
    return _cpu_device(settings, model, draft, max_model_len)


def cpu_dtype(settings: Settings) -> CpuDType:
    """The weight formats of a CPU. Raises `ConfigError` for that of a GPU alone."""
    if settings.dtype == "float16":
        raise ConfigError("dtype: float16 is for --device cuda; take auto, bfloat16 or float32")
    return settings.dtype


def kv_bytes(settings: Settings) -> int:
    """The KV cache's memory on devices that have no way to find out."""
    assert settings.kv_memory_bytes is not None
    return settings.kv_memory_bytes


def sim_pages(settings: Settings, model: Model) -> int:
    """Pages of a cache of imaginary memory."""
    return kv_bytes(settings) // page_bytes(model.config, kv_dtype("auto"))


def refused(error: Exception) -> ConfigError:
    """What a GPU's device or its plan refuses, by the name that the setting has."""
    return ConfigError(str(error).replace("kv_bytes:", "kv_memory:", 1))


def _cpu_device(settings: Settings, model: Model, draft: DraftModel | None, max_model_len: int) -> CpuDevice:
    return CpuDevice(
        model.config,
        model.weights,
        request_slots=settings.max_num_seqs,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes(settings),
        dtype=cpu_dtype(settings),
        threads=settings.threads or len(os.sched_getaffinity(0)),
        eager=settings.eager,
        cache_dir=cache_dir(),
        warn=_warn(),
        draft=draft,
        rejects=settings.speculative_sampling == "rejection",
    )


def _cuda_device(
    runtime: Runtime,
    settings: Settings,
    catalog: Sequence[GraphShape],
    model: Model,
    draft: DraftModel | None,
    max_model_len: int,
) -> CudaDevice:
    log = structlog.get_logger()
    try:
        return CudaDevice(
            model.config,
            model.weights,
            runtime=runtime,
            catalog=catalog,
            request_slots=settings.max_num_seqs,
            max_model_len=max_model_len,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_bytes=settings.kv_memory_bytes,
            dtype=settings.dtype,
            eager=settings.eager,
            warn=_warn(),
            log=lambda message: log.info("device.note", message=message),
            draft=draft,
            rejects=settings.speculative_sampling == "rejection",
        )
    except ValueError as error:
        raise refused(error) from None


def _sim_device(settings: Settings, catalog: Sequence[GraphShape], model: Model) -> PacedDevice:
    acceptance = RandomAcceptance(0, SIM_ACCEPTANCE, 0.1)
    return PacedDevice(
        SimCore(
            settings.max_num_seqs,
            sim_pages(settings, model),
            PAGE_TOKENS,
            _sim_duration(settings, catalog),
            tokens=TokenSource(alphabet=_words(model.tokenizer), eos_at=_answered),
            acceptance=acceptance,
            confidence=acceptance.confidence,
        )
    )


def _words(tokenizer: Tokenizer) -> Sequence[int]:
    """Tokens that are a word with a space before it; all tokens, where a vocabulary has none."""
    every = range(tokenizer.vocab_size)
    return [token for token in every if _WORD.fullmatch(tokenizer.token_bytes(token))] or every


def _answered(prompt_hash: int, _prompt_tokens: int, output_index: int) -> bool:
    """Whether an answer, whose length its prompt decides, is over."""
    least, below = SIM_ANSWER
    return output_index >= least + mix(prompt_hash & HASH_MASK) % (below - least)


def _sim_duration(settings: Settings, catalog: Sequence[GraphShape]) -> Duration:
    if settings.sim_costs is None:
        return _by_rows
    try:
        costs = load_costs(Path(settings.sim_costs))
        costs.check(catalog)
    except CostError as error:
        raise ConfigError(f"sim_costs: {error}") from None
    return costs.duration(lambda lane: lane.start)


def _by_rows(frame: Frame) -> int:
    return SIM_FRAME_NS + SIM_ROW_NS * packed_rows(frame.shape)


def _warn() -> Callable[[str], None]:
    log = structlog.get_logger()
    return lambda message: log.warning("device.notice", message=message)
