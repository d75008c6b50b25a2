"""`ModelConfig` from the config.json of a Hugging Face directory.

Owns the meaning of its fields for the supported model types, as `transformers` reads them. Surprising rule: what would
change the arithmetic and is not supported is refused, even when it is spelled in a field that older files lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flare.graphs.models.config import ModelConfig, RopeScaling

from .errors import ModelError
from .fields import Fields, read_json
from .layout import refuse_architecture

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""By `model_type`."""


def hf_config(folder: Path) -> ModelConfig:
    """The configuration that config.json declares. Raises `ModelError` for what is unsupported or missing."""
    path = folder / "config.json"
    values = read_json(path)
    try:
        return _config(values, path)
    except ModelError:
        raise
    except ValueError as error:  # from `ModelConfig` itself
        raise ModelError(f"{path}: {error}") from error


def _config(values: Mapping[str, object], path: Path) -> ModelConfig:
    fields = Fields(values, str(path))
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        raise refuse_architecture(model_type, path)
    if values.get("quantization_config") is not None:
        raise ModelError(f"{path} declares quantized safetensors, which are not supported; use the model as GGUF")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path} uses the activation {activation!r}; supported is silu")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    attention_bias = model_type != "mistral" and fields.flag("attention_bias", False)
    theta, scaling = _rope(fields, path)
    return ModelConfig(
        architecture=ARCHITECTURES[model_type],
        hidden=hidden,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", 128 if model_type == "qwen3" else hidden // max(heads, 1)),
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=model_type != "qwen2" and attention_bias,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
        qk_norm=model_type == "qwen3",
        sliding_window=_sliding_window(values, fields, model_type, path),
    )


def _rope(fields: Fields, path: Path) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    newer, older = fields.below("rope_parameters"), fields.below("rope_scaling")
    theta = newer.number("rope_theta", fields.number("rope_theta", 10000.0))
    if newer.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{path} rotates only a part of each head (partial_rotary_factor), which is not supported")
    rope = older if older.text("rope_type", older.text("type", "default")) != "default" else newer
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.integer("original_max_position_embeddings"),
        )
    raise ModelError(f"{path} uses rotary scaling {kind!r}; supported are default, linear and llama3")


def _sliding_window(values: Mapping[str, object], fields: Fields, model_type: str, path: Path) -> int | None:
    """The window if all layers have it, None if none has. Raises `ModelError` for a mixture."""
    window = fields.integer("sliding_window", 0)
    if (
        not window
        or model_type == "llama"
        or (model_type != "mistral" and not fields.flag("use_sliding_window", False))
    ):
        return None
    if model_type == "mistral":
        return window
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("max_window_layers", 28)
    kinds = values.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    distinct = set(kinds) if isinstance(kinds, list) else {kinds}
    if distinct == {"full_attention"}:
        return None
    if distinct == {"sliding_attention"}:
        return window
    raise ModelError(f"{path} mixes layers with and without a sliding window, which is not supported")
