"""Which tensors a model must have, and of what shapes.

Owns the list for each configuration and the check of a file against it. Does not own names in files: the reader
translates. Surprising rule: a tensor that no supported architecture has is refused too, for a program that ignored it
would give wrong text without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flare.graphs.models.config import ModelConfig

from .errors import ModelError

SUPPORTED_ARCHITECTURES = {
    "llama": "Llama, SmolLM2 and Mistral",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3, dense",
}


def refuse_architecture(found: str, path: Path) -> ModelError:
    """The error for a model that cannot be served, with the list of those that can."""
    supported = "; ".join(f"{name} ({what})" for name, what in SUPPORTED_ARCHITECTURES.items())
    return ModelError(f"{path} holds a model of architecture {found!r}; supported are {supported}")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name, with its row-major shape."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate, hidden),
        "mlp.up_proj.weight": (config.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate),
    }
    if config.qkv_bias:
        layer |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", queries), ("k", keys), ("v", keys))}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        layer |= {f"mlp.{name}_proj.bias": (config.intermediate,) for name in ("gate", "up")}
        layer["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_layout(
    config: ModelConfig, present: Mapping[str, tuple[int, ...]], file_name: Callable[[str], str], path: Path
) -> None:
    """Compare a file's tensors with the configuration's; `file_name` translates a Hugging Face name. Raises
    `ModelError` naming the first tensors that are missing, unknown or of another shape."""
    expected = {file_name(name): shape for name, shape in tensor_shapes(config).items()}
    if missing := [name for name in expected if name not in present]:
        raise ModelError(f"{path} lacks {_first(missing)}; the file is incomplete or not a whole model")
    if unknown := [name for name in present if name not in expected]:
        raise ModelError(f"{path} has {_first(unknown)}, which the {config.architecture} architecture does not use")
    for name, shape in expected.items():
        if present[name] != shape:
            raise ModelError(f"tensor {name} in {path} has shape {list(present[name])}, expected {list(shape)}")


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors ({shown}{', …' if len(names) > 3 else ''})"
