"""What `flare run` would prepare, from its settings.

Owns the way from settings to a catalog and its memory, and what is refused on the way. Does not own the catalog or the
arithmetic of memory (`graphs`). Surprising rule: `flare run` and `flare graphs --plan` both go through here, so that a
plan is refused wherever the server would be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flare.config.loader import load_policy, load_recipe, load_settings
from flare.config.schema import ConfigError, Policy, Settings
from flare.graphs.catalog import build_catalog
from flare.graphs.cpu.plan import kv_dtype, plan_memory
from flare.graphs.memory.pages import PAGE_TOKENS, page_bytes
from flare.machines.graph import GraphShape

from .draft import open_draft, speculation
from .model import Model, open_model
from .progress import LoadProgress


def read_settings(
    config_file: Path | None, overrides: Mapping[str, object]
) -> tuple[Settings, Policy, tuple[GraphShape, ...]]:
    """Settings, policy and catalog. Raises `ConfigError` for what is wrong, or more than this machine has."""
    settings = load_settings(config_file, overrides)
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
    cores = len(os.sched_getaffinity(0))
    if settings.threads is not None and settings.threads > cores:
        raise ConfigError(f"threads: {settings.threads} is more than the {cores} cores here; leave it unset for all")
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.kv_memory_bytes > machine_bytes:
        raise ConfigError(
            f"kv_memory: {settings.kv_memory_bytes} bytes are more than the {machine_bytes} of this machine; give less"
        )
    return settings, policy, catalog


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
    """The catalog, and its memory as (purpose, bytes). Raises `ConfigError` or `ModelError` where `flare run` would."""
    settings, _, catalog = read_settings(config_file, overrides)
    with LoadProgress() as progress:
        model = open_model(settings.model, progress.fetching)
        draft = open_draft(settings, model, progress.fetching)
    max_model_len, draft_config = context_length(settings, model), None if draft is None else draft.config
    pages = settings.kv_memory_bytes // page_bytes(model.config, kv_dtype(settings.dtype), draft_config)
    check_pages(pages * PAGE_TOKENS, max_model_len)
    memory = plan_memory(
        model.config,
        model.weights,
        catalog,
        max_model_len=max_model_len,
        kv_bytes=settings.kv_memory_bytes,
        dtype=settings.dtype,
        draft=draft_config,
    )
    return catalog, [
        ("weights", memory.weights_bytes),
        (f"KV cache, {memory.pages} pages", memory.kv_bytes),
        ("inputs and outputs", memory.buffers_bytes),
    ]
