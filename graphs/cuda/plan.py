"""What a card will take, told before it takes it.

Owns the number of pages, by which the device allocates them, and an estimate of the rest. Does not own what is really
taken, which the log tells after capture. Surprising rule: it needs no card; without one, the pages get `kv_bytes`, or
the share of a card of `total_bytes` that is said to be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from flare.machines.graph import GraphShape

from ..memory.pages import PAGE_TOKENS, page_bytes
from ..models.config import ModelConfig
from ..programs.extents import Extents, extents_of
from ..programs.rows import StateRows
from . import failures
from .forward import LOGITS_ELEMENTS
from .runtime import CardFacts
from .staging import Layout

DType = Literal["auto", "bfloat16", "float16", "float32"]

GRAPH_BYTES = 4 << 20
"""What CUDA itself keeps for an instantiated graph, about."""

LIBRARY_BYTES = 256 << 20
"""Workspaces of libraries, and modules that are loaded at first use."""

_LOGITS_COPIES = 12


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """Bytes on the card by purpose, `pinned_bytes` of the host, the pages that `kv_bytes` buys, and the most token
    rows that any graph packs."""

    weights_bytes: int
    state_bytes: int
    buffers_bytes: int
    capture_bytes: int
    kv_bytes: int
    pages: int
    pinned_bytes: int
    packed_rows: int


def torch_dtype(dtype: DType, facts: CardFacts | None = None) -> torch.dtype:
    """The type of weights and pages; "auto" is bfloat16 on every card that has it."""
    match dtype:
        case "auto":
            return torch.bfloat16 if facts is None or facts.capability >= (8, 0) else torch.float16
        case "bfloat16":
            return torch.bfloat16
        case "float16":
            return torch.float16
        case "float32":
            return torch.float32


def layout_of(
    config: ModelConfig,
    catalog: Sequence[GraphShape],
    *,
    request_slots: int,
    max_model_len: int,
    draft: ModelConfig | None = None,
    rejects: bool = False,
) -> Layout:
    """The blocks for frames of a catalog's graphs. No row has seen more distinct tokens than there are."""
    return Layout(
        extents_of(catalog),
        max_model_len=max_model_len,
        history=min(max_model_len, config.vocab),
        slots=request_slots + 1,
        draft_vocab=draft.vocab if draft is not None and rejects else 0,
    )


def plan_memory(
    config: ModelConfig,
    catalog: Sequence[GraphShape],
    *,
    request_slots: int,
    max_model_len: int,
    dtype: torch.dtype,
    kv_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    total_bytes: int | None = None,
    free_bytes: int | None = None,
    draft: ModelConfig | None = None,
    rejects: bool = False,
) -> CudaPlan:
    """Say what preparing `catalog` takes, and how many pages there are: what `kv_bytes` buys, else what is left of the
    share `gpu_memory_utilization` of `total_bytes`. `free_bytes` are those of the card now, if there is one.

    Raises `OutOfMemory` with the numbers where it does not fit, and ValueError if a cache of `kv_bytes` cannot hold one
    request of full length, or neither that nor `total_bytes` is given.
    """
    limits = {"request_slots": request_slots, "max_model_len": max_model_len}
    layout = layout_of(config, catalog, **limits, draft=draft, rejects=rejects)
    models = [config] if draft is None else [config, draft]
    weights = sum(_weights_bytes(model, dtype) for model in models)
    state = _state_bytes(request_slots + 1, max_model_len)
    state += sum(max_model_len * 2 * model.head_dim * 4 for model in models)  # their rotary tables
    capture = _capture_bytes(config, layout.extents, max_model_len, dtype) + GRAPH_BYTES * len(catalog)
    fixed = weights + state + layout.card_bytes + capture
    page = page_bytes(config, dtype, draft)
    needed = (-(-max_model_len // PAGE_TOKENS) + 1) * page
    if kv_bytes is None:
        if total_bytes is None:
            raise ValueError("kv_bytes: without a GPU, say how much memory the KV cache is to have")
        share = round(total_bytes * gpu_memory_utilization)
        if free_bytes is not None and free_bytes < share:
            raise failures.in_use(gpu_memory_utilization, share, free_bytes, total_bytes)
        pages_bytes = share - fixed
        if pages_bytes < needed:
            raise failures.does_not_fit("weights, buffers and the KV cache of one request", fixed + needed, share)
    else:
        pages_bytes = kv_bytes + page  # the page of nobody comes on top of what was asked for
        if pages_bytes < needed:
            raise ValueError(
                f"kv_bytes: {kv_bytes} holds {kv_bytes // page} pages of {PAGE_TOKENS} tokens; one request of "
                f"max_model_len {max_model_len} needs {needed // page - 1}: give {needed - page} bytes or lower "
                "max_model_len"
            )
        if free_bytes is not None and fixed + pages_bytes > free_bytes:
            raise failures.does_not_fit("weights, buffers and the KV cache", fixed + pages_bytes, free_bytes)
    pages = pages_bytes // page - 1
    return CudaPlan(
        weights_bytes=weights,
        state_bytes=state,
        buffers_bytes=layout.card_bytes,
        capture_bytes=capture,
        kv_bytes=pages * page,
        pages=pages,
        pinned_bytes=2 * (layout.input_bytes + layout.output_bytes),
        packed_rows=layout.extents.rows,
    )


def _weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """All matrices."""
    attention = config.head_dim * config.hidden * 2 * (config.heads + config.kv_heads)
    layers = config.layers * (attention + 3 * config.hidden * config.intermediate)
    embedding = config.hidden * config.vocab
    return dtype.itemsize * (layers + embedding * (1 if config.tie_embeddings else 2))


def _state_bytes(slots: int, max_model_len: int) -> int:
    with torch.device("meta"):
        rows = StateRows.allocate(slots, max_model_len)
    return sum(getattr(rows, field.name).nbytes for field in fields(rows))


def _capture_bytes(config: ModelConfig, extents: Extents, max_model_len: int, dtype: torch.dtype) -> int:
    """What the largest graphs use while they run. All share one pool, so that it counts once."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    floats = 6 * config.hidden + 4 * (query + 2 * key) + 4 * config.intermediate
    gathered = 2 * extents.lanes * -(-max_model_len // PAGE_TOKENS) * PAGE_TOKENS * key * dtype.itemsize
    places = extents.lanes * extents.width * config.hidden
    logits = _LOGITS_COPIES * max(LOGITS_ELEMENTS, config.vocab)
    return 4 * (extents.rows * floats + places + logits) + gathered + LIBRARY_BYTES
