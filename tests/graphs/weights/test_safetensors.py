"""Directories in Hugging Face layout: weights in every supported type, whole and in shards; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from flare.graphs.models.config import RopeScaling
from flare.graphs.weights.errors import ModelError
from flare.graphs.weights.hf_config import hf_config
from flare.graphs.weights.safetensors_source import SafetensorsSource
from tests.tiny_models import tiny_config, write_safetensors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def opened(folder: Path) -> SafetensorsSource:
    return SafetensorsSource(folder, hf_config(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_tensors_are_exactly_what_was_stored(
    tmp_path: Path, architecture: str, dtype: torch.dtype, shards: int
) -> None:
    config = tiny_config(architecture)
    expected = write_safetensors(tmp_path, config, dtype, shards)
    assert hf_config(tmp_path) == config
    source = opened(tmp_path)
    for name, tensor in expected.items():
        read = source.tensor(name)
        assert read.dtype == torch.float32
        assert torch.equal(read, tensor)
        assert source.int4_group32(name) is None
    with pytest.raises(KeyError, match=r"model\.layers\.9"):
        source.tensor("model.layers.9.mlp.up_proj.weight")


def test_a_tensor_belongs_to_whoever_read_it(tmp_path: Path) -> None:
    expected = write_safetensors(tmp_path, tiny_config())
    source = opened(tmp_path)
    source.tensor("model.norm.weight").zero_()
    assert torch.equal(source.tensor("model.norm.weight"), expected["model.norm.weight"])


def test_a_tied_head_is_not_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config(), changes={"tie_word_embeddings": True})
    source = opened(tmp_path)
    with pytest.raises(KeyError):
        source.tensor("lm_head.weight")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 8.0, 1.0, 4.0, 256)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeScaling("linear", 4.0)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, **LLAMA3}},
            RopeScaling("llama3", 8, 1, 4, 256),
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_rotary_scaling_is_read_in_both_spellings(
    tmp_path: Path, changes: dict[str, object], expected: RopeScaling | None
) -> None:
    write_safetensors(tmp_path, tiny_config(), changes=changes)
    config = hf_config(tmp_path)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, expected)


@pytest.mark.parametrize(
    ("model_type", "changes", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_the_sliding_window_is_the_one_in_force(
    tmp_path: Path, model_type: str, changes: dict[str, object], window: int | None
) -> None:
    write_safetensors(tmp_path, tiny_config(), changes={"model_type": model_type, **changes})
    assert hf_config(tmp_path).sliding_window == window


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_configuration_that_transformers_saved_reads_the_same(tmp_path: Path, model_type: str) -> None:
    saved = AutoConfig.for_model(
        model_type,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=77,
        max_position_embeddings=99,
        tie_word_embeddings=True,
    )
    saved.save_pretrained(tmp_path)
    config = hf_config(tmp_path)
    assert (config.hidden, config.layers, config.heads, config.kv_heads) == (96, 3, 6, 2)
    assert (config.head_dim, config.intermediate, config.vocab, config.max_positions) == (16, 80, 77, 99)
    assert config.tie_embeddings
    assert (config.qkv_bias, config.qk_norm) == (model_type == "qwen2", model_type == "qwen3")
    assert config.norm_eps == saved.rms_norm_eps
    assert config.rope_theta == saved.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, r"'gemma2'.*llama .*SmolLM2.*qwen2.*qwen3"),
        ({"model_type": "qwen3_moe"}, r"'qwen3_moe'"),
        ({"model_type": None}, r"lacks model_type"),
        ({"hidden_size": None}, r"lacks hidden_size"),
        ({"hidden_size": "256"}, r"unusable value for hidden_size: '256'"),
        ({"num_hidden_layers": 0}, r"layers is 0"),
        ({"num_key_value_heads": 3}, r"multiple of kv_heads"),
        ({"hidden_act": "gelu"}, r"'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"GGUF"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"'yarn'.*linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling lacks factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor"),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            r"mixes layers",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_safetensors(tmp_path, tiny_config(), changes=changes)
    with pytest.raises(ModelError, match=message):
        hf_config(tmp_path)


def test_config_json_must_be_there_and_whole(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        hf_config(tmp_path)


def test_missing_unknown_and_mistyped_tensors_are_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.self_attn.k_proj.weight"

    save_file({key: tensor for key, tensor in tensors.items() if key != name}, weights)
    with pytest.raises(ModelError, match=f"lacks tensor {name}"):
        opened(tmp_path)
    save_file(tensors | {"model.layers.0.adapter.weight": torch.ones(2)}, weights)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.adapter\.weight"):
        opened(tmp_path)
    save_file(tensors | {name: tensors[name][:64]}, weights)
    with pytest.raises(ModelError, match=rf"{name} .* shape \[64, 256\], expected \[128, 256\]"):
        opened(tmp_path)
    save_file(tensors | {name: tensors[name].to(torch.float64)}, weights)
    with pytest.raises(ModelError, match=rf"{name} .* F64; supported are F32, F16, BF16"):
        opened(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config(), shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ModelError, match=second.name):
        opened(tmp_path)
    second.unlink()
    with pytest.raises(ModelError, match=f"no {second.name}"):
        opened(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        opened(tmp_path)


def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    write_safetensors(tmp_path, tiny_config())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        opened(tmp_path)
