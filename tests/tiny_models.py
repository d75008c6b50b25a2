"""Tiny models in every file format, with the exact tensors that a reader must give back.

Owns random weights of a small Llama, Qwen2 or Qwen3 and their writers. Quantized blocks are packed here from their
numbers, not by the library that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from flare.graphs.models.config import ModelConfig
from flare.graphs.weights.gguf_source import gguf_name
from flare.graphs.weights.layout import tensor_shapes

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Rng = np.random.Generator

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 256, 2, 4, 2, 512, 320


def tiny_config(architecture: str = "llama", **changes: object) -> ModelConfig:
    """Two layers whose rows are whole blocks of every quantization."""
    fields: dict[str, object] = {
        "architecture": architecture,
        "hidden": HIDDEN,
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate": INTERMEDIATE,
        "vocab": VOCAB,
        "max_positions": 512,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors by Hugging Face name, exact in bfloat16 and float16."""
    random = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(random.integers(-127, 128, shape).astype(np.float32) / 512)
        for name, shape in tensor_shapes(config).items()
    }


def _nibbles(low: NDArray[np.int64], high: NDArray[np.int64]) -> Bytes:
    return (low | (high << 4)).astype(np.uint8)


def _halves(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(*values.shape, 2)


def _random_halves(random: Rng, shape: tuple[int, ...], divisor: int) -> Floats:
    """Scales so small that weights are about 1/20: attention between larger ones turns on the last bit of a sum."""
    return ((random.random(shape, dtype=np.float32) + 0.01) / np.float32(divisor)).astype(np.float16).astype(np.float32)


def _q4(random: Rng, rows: int, width: int, with_minimum: bool) -> tuple[Bytes, Floats]:
    blocks = rows * width // 32
    scale = _random_halves(random, (blocks, 1), 64)
    q = random.integers(0, 16, (blocks, 32))
    packed = _nibbles(q[:, :16], q[:, 16:])
    if with_minimum:
        minimum = -_random_halves(random, (blocks, 1), 64)
        stored = np.concatenate([_halves(scale)[:, 0], _halves(minimum)[:, 0], packed], axis=1)
        return stored.reshape(rows, -1), (scale * q.astype(np.float32) + minimum).reshape(rows, width)
    stored = np.concatenate([_halves(scale)[:, 0], packed], axis=1)
    return stored.reshape(rows, -1), (scale * (q - 8).astype(np.float32)).reshape(rows, width)


def _q8_0(random: Rng, rows: int, width: int) -> tuple[Bytes, Floats]:
    blocks = rows * width // 32
    scale = _random_halves(random, (blocks, 1), 1024)
    q = random.integers(-127, 128, (blocks, 32))
    stored = np.concatenate([_halves(scale)[:, 0], q.astype(np.int8).view(np.uint8)], axis=1)
    return stored.reshape(rows, -1), (scale * q.astype(np.float32)).reshape(rows, width)


def _q4_k(random: Rng, rows: int, width: int) -> tuple[Bytes, Floats]:
    """Blocks of 256: half d, half dmin, eight 6-bit scales and minima in 12 bytes, 4-bit q; w = d s q - dmin m."""
    blocks = rows * width // 256
    d, dmin = _random_halves(random, (blocks, 1), 2048), _random_halves(random, (blocks, 1), 2048)
    s, m = random.integers(0, 64, (blocks, 8)), random.integers(0, 64, (blocks, 8))
    q = random.integers(0, 16, (blocks, 8, 32))
    scales = np.concatenate(
        [
            s[:, :4] | ((s[:, 4:] >> 4) << 6),
            m[:, :4] | ((m[:, 4:] >> 4) << 6),
            (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
        ],
        axis=1,
    ).astype(np.uint8)
    packed = _nibbles(q[:, 0::2], q[:, 1::2]).reshape(blocks, 128)
    values = (d * s)[..., None] * q.astype(np.float32) - (dmin * m)[..., None]
    stored = np.concatenate([_halves(d)[:, 0], _halves(dmin)[:, 0], scales, packed], axis=1)
    return stored.reshape(rows, -1), values.astype(np.float32).reshape(rows, width)


def _q6_k(random: Rng, rows: int, width: int) -> tuple[Bytes, Floats]:
    """Blocks of 256: low 4 bits, high 2 bits, sixteen int8 scales, half d; w = d s (q - 32)."""
    blocks = rows * width // 256
    d = _random_halves(random, (blocks, 1), 8192)
    s = random.integers(-64, 64, (blocks, 16))
    q = random.integers(0, 64, (blocks, 2, 4, 32))  # halves of 128, quarters of 32
    low, high = q & 15, q >> 4
    ql = np.concatenate([_nibbles(low[:, :, 0], low[:, :, 2]), _nibbles(low[:, :, 1], low[:, :, 3])], axis=2)
    qh = (high << np.array([0, 2, 4, 6]).reshape(4, 1)).sum(axis=2).astype(np.uint8)
    stored = np.concatenate(
        [ql.reshape(blocks, 128), qh.reshape(blocks, 64), s.astype(np.int8).view(np.uint8), _halves(d)[:, 0]], axis=1
    )
    values = (d * s)[..., None] * (q.reshape(blocks, 16, 16) - 32).astype(np.float32)
    return stored.reshape(rows, -1), values.astype(np.float32).reshape(rows, width)


def _plain(dtype: torch.dtype) -> Callable[[Rng, int, int], tuple[Bytes, Floats]]:
    def make(random: Rng, rows: int, width: int) -> tuple[Bytes, Floats]:
        stored = torch.from_numpy(random.standard_normal((rows, width), dtype=np.float32) / 16).to(dtype)
        return stored.view(torch.uint8).numpy(), stored.to(torch.float32).numpy()

    return make


MATRIX_MAKERS: dict[str, Callable[[Rng, int, int], tuple[Bytes, Floats]]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": lambda random, rows, width: _q4(random, rows, width, with_minimum=False),
    "Q4_1": lambda random, rows, width: _q4(random, rows, width, with_minimum=True),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""By ggml type: random stored bytes of a matrix, and the numbers that they stand for."""


def write_gguf(
    path: Path,
    config: ModelConfig,
    type_name: str,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    drop: str = "",
) -> dict[str, torch.Tensor]:
    """A GGUF file whose matrices are stored as `type_name`; returns its tensors as a reader must give them.

    `edit` may add metadata; the tensor `drop` (its Hugging Face name) is left out.
    """
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    edit(writer)
    expected = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            values = random.standard_normal(shape, dtype=np.float32)
            stored, raw_type = _rotary_pairs(config, name, values), gguf.GGMLQuantizationType.F32
        else:
            stored, values = MATRIX_MAKERS[type_name](random, *shape)
            stored = _rotary_pairs(config, name, stored)
            raw_type = gguf.GGMLQuantizationType[type_name]
        if name != drop:
            expected[name] = torch.from_numpy(values)
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _rotary_pairs(config: ModelConfig, name: str, stored: NDArray[np.generic]) -> NDArray[np.generic]:
    """Rows of Llama's queries and keys as llama.cpp's converter permutes them."""
    if config.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return stored
    heads = config.heads if ".q_proj." in name else config.kv_heads
    halves = stored.reshape(heads, 2, stored.shape[0] // heads // 2, *stored.shape[1:])
    return halves.swapaxes(1, 2).reshape(stored.shape)


def write_safetensors(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """config.json and weights in `folder`; `changes` go into config.json. Returns the tensors."""
    tensors = tiny_tensors(config)
    fields: dict[str, object] = {
        "model_type": config.architecture,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(fields | dict(changes)))
    names = list(tensors)
    if shards == 1:
        save_file({name: tensors[name].to(dtype) for name in names}, folder / "model.safetensors")
        return tensors
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        held = names[index::shards]
        save_file({name: tensors[name].to(dtype) for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors
