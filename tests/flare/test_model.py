"""What `--model` may name: each kind of name gives the model, or says what is wrong and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import huggingface_hub.constants
import pytest
import torch

from flare.default_model import DEFAULT_MODEL
from flare.model import DEFAULT_NAME, Model, ModelError, open_model
from tests.graphs.programs.test_formats import check as check_logits
from tests.hub_server import hub_server
from tests.tiny_models import tiny_config, write_gguf, write_safetensors
from tests.tiny_tokenizers import byte_level_json, byte_level_metadata

SPECIAL = ["<s>", "</s>"]


def opened(name: Path | str) -> Model:
    return open_model(str(name), lambda what, done, total: None)


def write_directory(folder: Path, vocab: int = 320) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(byte_level_json(SPECIAL))
    settings = {"eos_token": "</s>", "chat_template": "{{ messages[0].content }}</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return write_safetensors(folder, tiny_config(vocab=vocab), shards=2)


def write_file(path: Path) -> dict[str, torch.Tensor]:
    path.parent.mkdir(parents=True, exist_ok=True)

    def edit(writer: gguf.GGUFWriter) -> None:
        for key, value in byte_level_metadata(SPECIAL).items():
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, int(str(value)))
        writer.add_chat_template("{{ messages[0].content }}</s>")

    return write_gguf(path, tiny_config(), "Q4_1", edit)


def check(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """The model's parts belong together."""
    assert model.config == tiny_config() or model.config.norm_eps == pytest.approx(tiny_config().norm_eps)
    assert model.context_length == 512
    assert all(torch.equal(model.weights.tensor(name), tensor) for name, tensor in tensors.items())
    ids = model.tokenizer.encode("hello world", parse_special=False)
    assert model.tokenizer.decode(ids) == "hello world"
    assert model.chat is not None
    assert model.chat.render([{"role": "user", "content": "hello world"}]).tokens == (*ids, *model.tokenizer.eos_ids)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[str]]]:
    """The root of a local hub and the paths asked for; the library's cache is a fresh one."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with hub_server(root) as (endpoint, requested):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield root, requested


def test_no_name_is_the_default_model(default_model: Model, default_model_path: Path) -> None:
    assert default_model.name == DEFAULT_NAME
    assert default_model_path.name == DEFAULT_MODEL.file_name
    assert (default_model.config.layers, default_model.config.vocab, default_model.context_length) == (30, 49152, 8192)
    assert default_model.config.tie_embeddings
    assert default_model.weights.tensor("model.norm.weight").shape == (576,)


def test_a_gguf_file(tmp_path: Path) -> None:
    tensors = write_file(tmp_path / "Tiny.Q4_1.gguf")
    model = opened(tmp_path / "Tiny.Q4_1.gguf")
    assert model.name == "Tiny.Q4_1"
    check(model, tensors)


def test_a_directory(tmp_path: Path) -> None:
    tensors = write_directory(tmp_path / "Tiny")
    model = opened(tmp_path / "Tiny")
    assert model.name == "Tiny"
    check(model, tensors)


def test_a_hub_id_and_again_without_a_network(hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, requested = hub
    tensors = write_directory(root / "owner" / "Tiny-1")
    (root / "owner" / "Tiny-1" / "pytorch_model.bin").write_bytes(b"not wanted")
    model = opened("owner/Tiny-1")
    assert model.name == "owner/Tiny-1"
    check(model, tensors)
    check_logits(model.config, model.weights, tensors)
    assert not any("pytorch_model" in path for path in requested)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    check(opened("owner/Tiny-1"), tensors)


def test_a_gguf_file_on_the_hub(hub: tuple[Path, list[str]]) -> None:
    root, _ = hub
    tensors = write_file(root / "owner" / "Tiny-GGUF" / "q" / "Tiny.gguf")
    with pytest.raises(ModelError, match=r"name one of them: owner/Tiny-GGUF/q/Tiny\.gguf"):
        opened("owner/Tiny-GGUF")
    model = opened("owner/Tiny-GGUF/q/Tiny.gguf")
    assert model.name == "owner/Tiny-GGUF/q/Tiny.gguf"
    check(model, tensors)
    with pytest.raises(ModelError, match=r"cannot fetch owner/Tiny-GGUF/other\.gguf"):
        opened("owner/Tiny-GGUF/other.gguf")


def test_a_hub_that_has_no_such_model(hub: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = hub
    with pytest.raises(ModelError, match="neither a file nor a hub repository 'owner/none'"):
        opened("owner/none")
    (root / "owner" / "empty").mkdir(parents=True)
    (root / "owner" / "empty" / "README.md").write_text("nothing")
    with pytest.raises(ModelError, match=r"neither config\.json with safetensors nor a GGUF file"):
        opened("owner/empty")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="cannot be reached"):
        opened("owner/never-fetched")


@pytest.mark.parametrize("name", ["./none.gguf", "/no/such/model", "none", "a/b/c", "a b/c"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory, and it is not a hub id"):
        opened(name)


def test_a_directory_of_gguf_files_names_one(tmp_path: Path) -> None:
    write_file(tmp_path / "Tiny.gguf")
    with pytest.raises(ModelError, match=r"name one of them, such as .*Tiny\.gguf"):
        opened(tmp_path)


def test_a_tokenizer_beyond_the_weights_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path / "Tiny", vocab=256)
    with pytest.raises(ModelError, match=r"tokenizer has 273 tokens, its weights only 256"):
        opened(tmp_path / "Tiny")
