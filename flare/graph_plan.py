"""What `flare run` would prepare, from its settings.

Owns the way from settings to a catalog and its memory. Does not own either: the catalog and the device say them.
Surprising rule: it goes the way of `flare run`, step by step, and so refuses what that would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flare.config.loader import load_recipe, load_settings
from flare.graphs.catalog import build_catalog
from flare.graphs.cpu.plan import plan_memory
from flare.machines.graph import GraphShape

from .model import open_model
from .progress import LoadProgress


def plan_graphs(
    config_file: Path | None, overrides: Mapping[str, object]
) -> tuple[tuple[GraphShape, ...], list[tuple[str, int]]]:
    """The catalog, and its memory as (purpose, bytes).

    Raises `ConfigError`, `ModelError` or another ValueError that names what is refused.
    """
    settings = load_settings(config_file, overrides)
    catalog = build_catalog(load_recipe(settings.recipe), settings.max_num_seqs, settings.max_prefill_tokens)
    with LoadProgress() as progress:
        model = open_model(settings.model, progress.fetching)
    memory = plan_memory(
        model.config,
        model.weights,
        catalog,
        max_model_len=settings.max_model_len or model.context_length,
        kv_bytes=settings.kv_memory_bytes,
        dtype=settings.dtype,
    )
    return catalog, [
        ("weights", memory.weights_bytes),
        (f"KV cache, {memory.pages} pages", memory.kv_bytes),
        ("inputs and outputs", memory.buffers_bytes),
    ]
