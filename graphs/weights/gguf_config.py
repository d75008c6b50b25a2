"""`ModelConfig` from the metadata of a GGUF file.

Owns the meaning of llama.cpp's `{architecture}.…` keys. Does not own tokenizer metadata (`flare/tokens`). Surprising
rule: Llama 3's rotary scaling is stored as a tensor of divisors, not as parameters; the parameters are recovered and
must reproduce the tensor.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flare.graphs.models.config import ModelConfig, RopeScaling

from .errors import ModelError
from .fields import Fields
from .gguf_file import GgufFile
from .layout import SUPPORTED_ARCHITECTURES, refuse_architecture


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration that the file declares. Raises `ModelError` for what is unsupported, missing or malformed."""
    try:
        return _config(file)
    except ModelError:
        raise
    except ValueError as error:  # from `ModelConfig` itself
        raise ModelError(f"{file.path}: {error}") from error


def _config(file: GgufFile) -> ModelConfig:
    architecture = Fields(file.metadata, str(file.path)).text("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise refuse_architecture(architecture, file.path)
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields(own, f"{file.path}, {architecture}")
    if keys.integer("expert_count", 0):
        raise refuse_architecture(f"{architecture} with experts (MoE)", file.path)
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    rotated = keys.integer("rope.dimension_count", head_dim)
    if keys.integer("attention.value_length", head_dim) != head_dim or rotated != head_dim:
        raise ModelError(f"{file.path} has heads of unequal or partly rotated widths, which is not supported")
    theta = keys.number("rope.freq_base", 10000.0)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks tensor token_embd.weight; the file is incomplete or not a whole model")
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        layers=keys.integer("block_count"),
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.integer("feed_forward_length"),
        vocab=embedding.shape[0],
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_llama3_scaling(file, theta, head_dim) or _linear_scaling(keys, file.path),
        max_positions=keys.integer("context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
    )


def _linear_scaling(keys: Fields, path: Path) -> RopeScaling | None:
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelError(f"{path} uses rotary scaling {kind!r}; supported are none, linear and llama3")
    return None if kind == "none" or factor == 1.0 else RopeScaling("linear", factor)


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> RopeScaling | None:
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return None
    if stored.type_name != "F32" or stored.shape != (head_dim // 2,):
        raise ModelError(f"tensor rope_freqs.weight in {file.path} is not float32[{head_dim // 2}]")
    divisors = file.rows(stored).view("<f4")[0]
    scaling = RopeScaling("llama3", factor=float(divisors.max()))  # the other parameters never differ in practice
    if not np.allclose(divisors, _llama3_divisors(scaling, theta, head_dim), rtol=1e-4):
        raise ModelError(f"{file.path} has rotary divisors (rope_freqs.weight) that are not llama3's; not supported")
    return scaling


def _llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> NDArray[np.float64]:
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = scaling.original_max_positions / wavelengths - scaling.low_freq_factor
    kept = np.clip(blend / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    divisors: NDArray[np.float64] = 1 / ((1 - kept) / scaling.factor + kept)
    return divisors
