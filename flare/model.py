"""What `--model` names, as everything that serving it needs.

Owns finding the files and putting their readers together. Does not own the readers (`graphs/weights`, `flare/tokens`),
fetching (`default_model`, `hub`), or memory: weights stay in their files until a device asks. Surprising rule: a file
or directory of that name wins over a hub repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.source import WeightSource
from flare.graphs.weights.errors import ModelError
from flare.graphs.weights.gguf_config import gguf_config
from flare.graphs.weights.gguf_file import open_gguf
from flare.graphs.weights.gguf_source import GgufSource
from flare.graphs.weights.hf_config import hf_config
from flare.graphs.weights.safetensors_source import SafetensorsSource

from .default_model import Progress, fetch_default_model
from .hub import fetch_from_hub, is_hub_id
from .tokens.chat import ChatTemplate
from .tokens.from_gguf import chat_template_from_gguf, tokenizer_from_gguf
from .tokens.from_hf import chat_template_from_directory, tokenizer_from_directory
from .tokens.tokenizer import Tokenizer

__all__ = ["DEFAULT_NAME", "Model", "ModelError", "open_model"]

DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to be put on a device. `name` is what clients call it unless told otherwise; `context_length` is in
    tokens, as the model declares it. `chat` None: it has no chat template."""

    name: str
    config: ModelConfig
    weights: WeightSource
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    context_length: int


def open_model(wanted: str | None, progress: Progress) -> Model:
    """Find, fetch where necessary, and open a model.

    `wanted` is None (the default model), a GGUF file, a directory in Hugging Face layout, a hub id `owner/name`, or
    `owner/name/file.gguf`. Raises `ModelError`.
    """
    if wanted is None:
        return _from_gguf(fetch_default_model(progress), DEFAULT_NAME)
    path = Path(wanted).expanduser()
    if path.is_file():
        return _from_gguf(path, path.stem)
    if path.is_dir():
        return _from_directory(path, path.resolve().name)
    if not is_hub_id(wanted):
        raise ModelError(f"--model {wanted}: there is no such file or directory, and it is not a hub id (owner/name)")
    fetched = fetch_from_hub(wanted)
    return _from_gguf(fetched, wanted) if fetched.is_file() else _from_directory(fetched, wanted)


def _from_gguf(path: Path, name: str) -> Model:
    file = open_gguf(path)
    config = gguf_config(file)
    weights = GgufSource(file, config)
    tokenizer = tokenizer_from_gguf(file.metadata)
    return _model(name, config, weights, tokenizer, chat_template_from_gguf(file.metadata, tokenizer))


def _from_directory(folder: Path, name: str) -> Model:
    if not (folder / "config.json").exists() and (quantized := sorted(folder.glob("*.gguf"))):
        raise ModelError(f"{folder} holds GGUF files; name one of them, such as {quantized[0]}")
    config = hf_config(folder)
    weights = SafetensorsSource(folder, config)
    tokenizer = tokenizer_from_directory(folder)
    return _model(name, config, weights, tokenizer, chat_template_from_directory(folder, tokenizer))


def _model(
    name: str, config: ModelConfig, weights: WeightSource, tokenizer: Tokenizer, chat: ChatTemplate | None
) -> Model:
    if tokenizer.vocab_size > config.vocab:
        raise ModelError(f"{name}: its tokenizer has {tokenizer.vocab_size} tokens, its weights only {config.vocab}")
    return Model(name, config, weights, tokenizer, chat, context_length=config.max_positions)
