"""What a device will take, told before it takes it.

Owns the number of pages, by which `CpuDevice` allocates them, and an estimate of the rest. Does not count what no
catalog changes: state rows, the rotary table and each thread's working memory, a few MiB. Surprising rule: pages get
exactly `kv_bytes`, rounded down; everything else comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flare.machines.graph import GraphShape

from ..memory.pages import PAGE_TOKENS, page_bytes
from ..models.config import ModelConfig
from ..models.source import WeightSource
from ..programs.buffers import StepBuffers
from ..programs.decoder import layer_names
from ..programs.extents import extents_of

DType = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the pages that `kv_bytes` buys."""

    weights_bytes: int
    kv_bytes: int
    buffers_bytes: int
    pages: int


def kv_dtype(dtype: DType) -> torch.dtype:
    """The type of the KV cache: float32 for the exact program, else bfloat16."""
    return torch.float32 if dtype == "float32" else torch.bfloat16


def plan_memory(
    config: ModelConfig,
    weights: WeightSource,
    catalog: Sequence[GraphShape],
    *,
    max_model_len: int,
    kv_bytes: int,
    dtype: DType,
    draft: ModelConfig | None = None,
) -> MemoryPlan:
    """Say what preparing `catalog` takes, with the keys and values of a `draft`. Raises ValueError if `kv_bytes` cannot
    hold one request of full length."""
    one_page = page_bytes(config, kv_dtype(dtype), draft)
    pages, needed = kv_bytes // one_page, -(-max_model_len // PAGE_TOKENS)
    if pages < needed:
        raise ValueError(
            f"kv_bytes: {kv_bytes} holds {pages} pages of {PAGE_TOKENS} tokens; one request of max_model_len "
            f"{max_model_len} needs {needed}: give {needed * one_page} bytes or lower max_model_len"
        )
    extents = extents_of(catalog)
    query_width, key_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    floats = config.hidden + 2 * query_width + 2 * key_width
    quantized = config.hidden + query_width + config.intermediate  # a byte each, and 12 more for every 32
    activations = extents.rows * (4 * floats + quantized + quantized * 12 // 32)
    logits = max(extents.lanes, 16) * config.vocab * 4
    return MemoryPlan(
        weights_bytes=_weights_bytes(config, weights, dtype),
        kv_bytes=pages * one_page,
        buffers_bytes=StepBuffers.bytes_for(extents, max_model_len) + activations + logits,
        pages=pages,
    )


def _weights_bytes(config: ModelConfig, weights: WeightSource, dtype: DType) -> int:
    """Bytes of all matrices; in `auto`, layer 0 tells how the layers are stored."""
    attention = config.head_dim * config.hidden * 2 * (config.heads + config.kv_heads)
    layers = config.layers * (attention + 3 * config.hidden * config.intermediate)
    embedding = config.hidden * config.vocab
    heads = embedding * (1 if config.tie_embeddings else 2)
    match dtype:
        case "float32":
            return 4 * (layers + heads)
        case "bfloat16":
            return 2 * (layers + heads)
        case "auto":
            four_bit = weights.int4_group32(f"{layer_names(0).output[0]}.weight") is not None
            # codes, and a float16 scale (and minimum) per group of 32; the embedding is read from the head if tied
            return layers * (20 if four_bit else 34) // 32 + heads * 34 // 32
