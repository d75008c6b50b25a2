"""Weights from a GGUF file, under their Hugging Face names and in their Hugging Face layout.

Owns the two vocabularies of names, dequantizing, and the order of rows in Llama's query and key projections. Does not
own the container (`gguf_file`) or the configuration (`gguf_config`). Surprising rule: llama.cpp stores the rows of
Llama's queries and keys with the two halves of a rotary pair side by side; they are put back here, by whole rows, so
that quantized blocks stay exact.
"""

from __future__ import annotations

import re
from typing import TypeVar

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.source import Int4Groups

from .errors import ModelError
from .gguf_file import GgufFile, GgufTensor
from .layout import check_layout

T = TypeVar("T", bound=np.generic)

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
IGNORED = ("rope_freqs.weight",)
"""Read with the configuration."""

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUERY_OR_KEY = re.compile(r"\.[qk]_proj\.")
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor name. Raises `KeyError` for a name that no supported model has."""
    if match := LAYER_NAME.fullmatch(name):
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return TOP_NAMES[name]


class GgufSource:
    """A `WeightSource` over a mapped file. Raises `ModelError` at once when a tensor is missing, unknown, of another
    shape, or stored in an unsupported type."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        present = {name: tensor.shape for name, tensor in file.tensors.items() if name not in IGNORED}
        check_layout(config, present, gguf_name, file.path)
        for tensor in file.tensors.values():
            if tensor.type_name not in SUPPORTED_TYPES:
                raise ModelError(
                    f"tensor {tensor.name} in {file.path} is stored as {tensor.type_name}; "
                    f"supported are {', '.join(SUPPORTED_TYPES)}"
                )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as float32, a fresh copy. Raises `KeyError` if the model has none of that name."""
        stored = self._file.tensors[gguf_name(name)]
        values = dequantize(self._file.rows(stored), GGMLQuantizationType[stored.type_name])
        values = self._rotary_order(name, values.reshape(stored.shape))
        return torch.from_numpy(np.array(values, np.float32, order="C"))

    def int4_group32(self, name: str) -> Int4Groups | None:
        """The stored blocks of a Q4_0 or Q4_1 matrix, so that w = scale * q + minimum exactly; None for other types."""
        stored = self._file.tensors[gguf_name(name)]
        if stored.type_name not in ("Q4_0", "Q4_1") or len(stored.shape) != 2:
            return None
        parts = _int4_blocks(self._file.rows(stored), stored)
        q, scale, minimum = (torch.from_numpy(self._rotary_order(name, part).copy()) for part in parts)
        return Int4Groups(q, scale, minimum)

    def _rotary_order(self, name: str, values: NDArray[T]) -> NDArray[T]:
        """Rows [head, pair, half] as llama.cpp keeps them, to [head, half, pair]."""
        config = self._config
        if config.architecture != "llama" or not QUERY_OR_KEY.search(name):
            return values
        heads = config.heads if ".q_proj." in name else config.kv_heads
        split = values.reshape(heads, config.head_dim // 2, 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)


def _int4_blocks(
    rows: NDArray[np.uint8], stored: GgufTensor
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """q uint8[out, in], scale and minimum float32[out, in / 32] of Q4_0 (half d, 16 bytes) or Q4_1 (half d, half m,
    16 bytes) blocks; byte i of a block holds item i in its low and item i + 16 in its high half."""
    outputs, inputs = stored.shape
    blocks = rows.reshape(outputs, inputs // 32, -1)
    scale = _halves(blocks[..., 0:2])
    minimum = _halves(blocks[..., 2:4]) if stored.type_name == "Q4_1" else scale * np.float32(-8)
    packed = blocks[..., -16:]
    q = np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=-1)
    return q.reshape(outputs, inputs), scale, minimum


def _halves(pairs: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float32)
