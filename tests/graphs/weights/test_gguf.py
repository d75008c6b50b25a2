"""GGUF files: every supported type gives exactly the numbers that its blocks stand for; the rest is refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from flare.graphs.models.config import RopeScaling
from flare.graphs.weights.errors import ModelError
from flare.graphs.weights.gguf_config import gguf_config
from flare.graphs.weights.gguf_file import open_gguf
from flare.graphs.weights.gguf_source import SUPPORTED_TYPES, GgufSource
from tests.tiny_models import MATRIX_MAKERS, tiny_config, write_gguf


def opened(path: Path) -> GgufSource:
    file = open_gguf(path)
    return GgufSource(file, gguf_config(file))


def test_every_supported_type_is_tested() -> None:
    assert set(MATRIX_MAKERS) == set(SUPPORTED_TYPES)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_tensors_are_exactly_what_was_stored(tmp_path: Path, type_name: str) -> None:
    expected = write_gguf(tmp_path / "model.gguf", tiny_config(), type_name)
    source = opened(tmp_path / "model.gguf")
    for name, tensor in expected.items():
        read = source.tensor(name)
        assert read.dtype == torch.float32
        torch.testing.assert_close(read, tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_keep_their_rows(tmp_path: Path, architecture: str) -> None:
    config = tiny_config(architecture)
    expected = write_gguf(tmp_path / "model.gguf", config, "F16")
    file = open_gguf(tmp_path / "model.gguf")
    read = gguf_config(file)
    assert (read.qkv_bias, read.qk_norm) == (config.qkv_bias, config.qk_norm)
    source = GgufSource(file, read)
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1"])
def test_int4_groups_are_exact(tmp_path: Path, type_name: str) -> None:
    expected = write_gguf(tmp_path / "model.gguf", tiny_config(), type_name)
    source = opened(tmp_path / "model.gguf")
    for name, tensor in expected.items():
        groups = source.int4_group32(name)
        assert (groups is None) == (tensor.dim() == 1)
        if groups is not None:
            rows, width = tensor.shape
            assert groups.q.dtype == torch.uint8
            assert groups.scale.shape == groups.minimum.shape == (rows, width // 32)
            q = groups.q.reshape(rows, -1, 32).to(torch.float32)
            weights = q * groups.scale[..., None] + groups.minimum[..., None]
            assert torch.equal(weights.reshape(rows, width), tensor)


def test_other_types_have_no_int4_groups(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config(), "Q8_0")
    assert opened(tmp_path / "model.gguf").int4_group32("model.layers.0.self_attn.q_proj.weight") is None


def test_the_configuration_is_what_the_metadata_say(tmp_path: Path) -> None:
    config = tiny_config(tie_embeddings=True, sliding_window=128, rope_scaling=RopeScaling("linear", 2.0))

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    write_gguf(tmp_path / "model.gguf", config, "F32", edit)
    read = gguf_config(open_gguf(tmp_path / "model.gguf"))
    assert read.norm_eps == pytest.approx(config.norm_eps)
    assert {field: getattr(read, field) for field in read.__struct_fields__ if field != "norm_eps"} == {
        field: getattr(config, field) for field in config.__struct_fields__ if field != "norm_eps"
    }


def llama3_divisors(factor: float, low: float, high: float, context: float) -> list[float]:
    """Written from the formula of Llama 3.1's own `apply_scaling`, frequency by frequency."""
    divisors = []
    for pair in range(32):
        frequency = 500000.0 ** (-2 * pair / 64)
        wavelength = 2 * np.pi / frequency
        if wavelength < context / high:
            scaled = frequency
        elif wavelength > context / low:
            scaled = frequency / factor
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled = (1 - smooth) * frequency / factor + smooth * frequency
        divisors.append(frequency / scaled)
    return divisors


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(8.0, 1.0, 4.0, 8192), np.float32))

    write_gguf(tmp_path / "model.gguf", tiny_config(rope_theta=500000.0), "F32", edit)
    scaling = gguf_config(open_gguf(tmp_path / "model.gguf")).rope_scaling
    assert scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_unknown_rotary_divisors_are_refused(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(llama3_divisors(8.0, 1.0, 2.0, 4096), np.float32))

    write_gguf(tmp_path / "model.gguf", tiny_config(rope_theta=500000.0), "F32", edit)
    with pytest.raises(ModelError, match="rope_freqs"):
        gguf_config(open_gguf(tmp_path / "model.gguf"))


def test_other_rotary_scalings_are_refused(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    write_gguf(tmp_path / "model.gguf", tiny_config(), "F32", edit)
    with pytest.raises(ModelError, match=r"'yarn'.*none, linear and llama3"):
        gguf_config(open_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize("experts", [0, 8])
def test_unsupported_architectures_are_refused_with_the_list(tmp_path: Path, experts: int) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(experts)

    config = tiny_config("llama" if experts else "gemma2")
    write_gguf(tmp_path / "model.gguf", config, "F32", edit)
    with pytest.raises(ModelError, match=r"(MoE|'gemma2').*llama .*SmolLM2.*qwen2.*qwen3"):
        gguf_config(open_gguf(tmp_path / "model.gguf"))


def test_an_unsupported_tensor_type_is_refused_with_the_list(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(), "Q4_0")
    content = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16  # after the name: two dimensions, then the type
    assert content[at] == gguf.GGMLQuantizationType.Q4_0
    content[at] = gguf.GGMLQuantizationType.IQ4_NL  # the same size of block
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight .* IQ4_NL; supported are .*Q4_K"):
        opened(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config(), "F32", drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"lacks tensor blk\.1\.ffn_up\.weight"):
        opened(tmp_path / "model.gguf")


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sub_norm.weight", np.ones(4, np.float32))

    write_gguf(tmp_path / "model.gguf", tiny_config(), "F32", edit)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sub_norm\.weight"):
        opened(tmp_path / "model.gguf")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config(), "F32", lambda writer: writer.add_key_length(32))
    with pytest.raises(ModelError, match=r"attn_q\.weight .* shape \[256, 256\], expected \[128, 256\]"):
        opened(tmp_path / "model.gguf")


def test_partly_rotated_heads_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_config(), "F32", lambda writer: writer.add_rope_dimension_count(32))
    with pytest.raises(ModelError, match="partly rotated"):
        opened(tmp_path / "model.gguf")


def test_missing_metadata_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(), "F32")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.blocks_gone"))
    with pytest.raises(ModelError, match="lacks block_count"):
        opened(path)


def test_a_file_cut_short_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_config(), "F32")
    whole = path.read_bytes()
    for length in [5, 11, 30, 200, 900, 2000, len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut short|fetch"):
            open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"GGUF\x01\x00\x00\x00" + bytes(16)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_gguf(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        open_gguf(tmp_path / "none.gguf")
