"""From file to logits: a tiny model in each format and layout gives the logits of its exact tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.decoder import Decoder
from flare.graphs.weights.gguf_config import gguf_config
from flare.graphs.weights.gguf_file import open_gguf
from flare.graphs.weights.gguf_source import SUPPORTED_TYPES, GgufSource
from flare.graphs.weights.hf_config import hf_config
from flare.graphs.weights.safetensors_source import SafetensorsSource
from tests.graphs.programs.test_decoder import IDS, TOLERANCE, forward, reference_model
from tests.tiny_models import tiny_config, write_gguf, write_safetensors


def check(config: ModelConfig, source: WeightSource, tensors: Mapping[str, torch.Tensor]) -> None:
    """The decoder on `source` against the reference implementation on `tensors`."""
    model = reference_model(config)
    missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    with torch.inference_mode():
        logits = model(IDS[None]).logits[0]
    got = forward(Decoder(config, source, 128, torch.float32), IDS, torch.tensor([1, 2, 0]), (50, 33))
    assert float((got - logits).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_gguf(tmp_path: Path, type_name: str, architecture: str) -> None:
    tensors = write_gguf(tmp_path / "model.gguf", tiny_config(architecture), type_name)
    file = open_gguf(tmp_path / "model.gguf")
    config = gguf_config(file)
    check(config, GgufSource(file, config), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    tensors = write_safetensors(tmp_path, tiny_config(), dtype, shards)
    config = hf_config(tmp_path)
    check(config, SafetensorsSource(tmp_path, config), tensors)
