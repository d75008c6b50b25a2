"""What `flare run` would prepare, from its settings.

Owns the way from settings to a catalog and its memory, and what is refused on the way. Does not own the catalog or the
arithmetic of memory (`graphs`). Surprising rule: `flare run` and `flare graphs --plan` both go through here, so that a
plan is refused wherever the server would be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flare.config.loader import load_policy, load_recipe
from flare.config.schema import ConfigError, Policy, Settings
from flare.graphs.catalog import build_catalog
from flare.graphs.cpu.plan import kv_dtype, plan_memory
from flare.graphs.cuda import plan as cuda
from flare.graphs.cuda.failures import DeviceFailure
from flare.graphs.cuda.runtime import Runtime
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.graphs.models.config import ModelConfig
from flare.machines.graph import GraphShape

from .device import cpu_dtype, kv_bytes, refused, sim_pages
from .device_choice import choose_device
from .draft import open_draft, speculation
from .model import Model, open_model
from .progress import LoadProgress


def read_plan(settings: Settings) -> tuple[Policy, tuple[GraphShape, ...]]:
    """Policy and catalog. Raises `ConfigError` for what is wrong, or more than this machine has."""
    policy = load_policy(
        settings.scheduler_policy,
        settings.scheduler_terminal_value,
        settings.scheduler_terminal_age_price,
        settings.mtp_adaptive_verification_alpha,
    )
    catalog = build_catalog(
        load_recipe(settings.recipe),
        settings.max_num_seqs,
        settings.max_prefill_tokens,
        mixed_prefill=settings.mixed_prefill,
        speculation=speculation(settings),
    )
    if settings.device == "cpu":
        _check_machine(settings)
    return policy, catalog


def _check_machine(settings: Settings) -> None:
    cores = len(os.sched_getaffinity(0))
    if settings.threads is not None and settings.threads > cores:
        raise ConfigError(f"threads: {settings.threads} is more than the {cores} cores here; leave it unset for all")
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if kv_bytes(settings) > machine_bytes:
        raise ConfigError(
            f"kv_memory: {kv_bytes(settings)} bytes are more than the {machine_bytes} of this machine; give less"
        )


def context_length(settings: Settings, model: Model) -> int:
    """The context to serve, in tokens. Raises `ConfigError` for one longer than the model's."""
    if settings.max_model_len is None:
        return model.context_length
    if settings.max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len: {settings.max_model_len} is beyond the model's context of {model.context_length} tokens"
        )
    return settings.max_model_len


def check_pages(tokens: int, max_model_len: int) -> None:
    """Raises `ConfigError` unless the `tokens` of the KV cache hold one request of full length."""
    if tokens < max_model_len:
        raise ConfigError(
            f"kv_memory: {tokens} tokens fit, and one request may take {max_model_len}; "
            "give more memory or a smaller --max-model-len"
        )


def plan_graphs(
    config_file: Path | None, overrides: Mapping[str, object]
) -> tuple[tuple[GraphShape, ...], list[tuple[str, int]]]:
    """The catalog, and its memory as (purpose, bytes). A GPU that is named need not be there.

    Raises `ConfigError` or `ModelError` where `flare run` would refuse.
    """
    choice = choose_device(config_file, overrides, planning=True)
    settings = choice.settings
    _, catalog = read_plan(settings)
    with LoadProgress() as progress:
        model = open_model(settings.model, progress.fetching)
        draft = open_draft(settings, model, progress.fetching)
    draft_config = None if draft is None else draft.config
    match settings.device:
        case "cuda":
            return catalog, _cuda_memory(settings, catalog, model, draft_config, choice.runtime)
        case "sim":
            pages = sim_pages(settings, model)
            check_pages(pages * PAGE_TOKENS, context_length(settings, model))
            return catalog, [(f"imaginary, {pages} pages", kv_bytes(settings))]
        case _:
            return catalog, _cpu_memory(settings, catalog, model, draft_config)


def _cpu_memory(
    settings: Settings, catalog: Sequence[GraphShape], model: Model, draft: ModelConfig | None
) -> list[tuple[str, int]]:
    max_model_len, dtype = context_length(settings, model), cpu_dtype(settings)
    pages = kv_bytes(settings) // page_bytes(model.config, kv_dtype(dtype), draft)
    check_pages(pages * PAGE_TOKENS, max_model_len)
    memory = plan_memory(
        model.config,
        model.weights,
        catalog,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes(settings),
        dtype=dtype,
        draft=draft,
    )
    return [
        ("weights", memory.weights_bytes),
        (f"KV cache, {memory.pages} pages", memory.kv_bytes),
        ("inputs and outputs", memory.buffers_bytes),
    ]


def _cuda_memory(
    settings: Settings,
    catalog: Sequence[GraphShape],
    model: Model,
    draft: ModelConfig | None,
    runtime: Runtime | None,
) -> list[tuple[str, int]]:
    """Without a GPU whose memory could be shared out, or bytes that are given, the cache has one request's pages."""
    max_model_len, facts = context_length(settings, model), None if runtime is None else runtime.facts()
    dtype, given = cuda.torch_dtype(settings.dtype, facts), settings.kv_memory_bytes
    least = given is None and facts is None
    if least:
        given = -(-max_model_len // PAGE_TOKENS) * page_bytes(model.config, dtype, draft)
    try:
        memory = cuda.plan_memory(
            model.config,
            catalog,
            request_slots=settings.max_num_seqs,
            max_model_len=max_model_len,
            dtype=dtype,
            kv_bytes=given,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            total_bytes=None if facts is None else facts.total_bytes,
            free_bytes=None if runtime is None else runtime.free_bytes(),
            draft=draft,
            rejects=settings.speculative_sampling == "rejection",
        )
    except (ValueError, DeviceFailure) as error:
        raise refused(error) from None
    return [
        ("weights", memory.weights_bytes),
        (f"KV cache, {'at least ' if least else ''}{memory.pages} pages", memory.kv_bytes),
        ("request rows", memory.state_bytes),
        ("inputs and outputs", memory.buffers_bytes),
        ("graphs, about", memory.capture_bytes),
    ]
