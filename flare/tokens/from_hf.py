"""A `Tokenizer` from a directory in Hugging Face layout.

Owns the files `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`. Surprising rule: which bytes a
token stands for follows from the decoder that tokenizer.json declares: byte-level, or byte fallback; any other is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import tokenizers

from flare.graphs.weights.errors import ModelError
from flare.graphs.weights.fields import read_json

from .chat import ChatTemplate
from .template import Template
from .tokenizer import Tokenizer, Vocabulary, byte_fallback_bytes, byte_level_bytes

TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_directory(folder: Path) -> Tokenizer:
    """Raises `ModelError` if a file is missing, damaged, or declares what is not supported."""
    path = folder / "tokenizer.json"
    declared = read_json(path)
    settings = read_json(folder / "tokenizer_config.json", missing_ok=True)
    build = partial(tokenizers.Tokenizer.from_file, str(path))
    try:
        inner = build()
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{path} cannot be read: {error}") from error
    begun = inner.encode("", add_special_tokens=True).ids
    bos_text = _text_of(settings.get("bos_token"))
    bos_id = inner.token_to_id(bos_text) if bos_text else next(iter(begun), None)
    adds_bos = settings.get("add_bos_token")
    decoders = _decoders(declared)
    vocabulary = Vocabulary(
        pieces=_pieces(inner, decoders, path),
        special={index: token.content for index, token in inner.get_added_tokens_decoder().items() if token.special},
        eos_ids=_eos_ids(inner, settings, folder),
        bos_id=bos_id,
        add_bos=adds_bos if isinstance(adds_bos, bool) else begun[:1] == [bos_id],
        leading_space=bool(decoders.get("Strip", {}).get("start")),
    )
    return Tokenizer(build, vocabulary)


def chat_template_from_directory(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The default chat template, from its own file or from tokenizer_config.json; None if there is none.

    Raises `ModelError`.
    """
    settings = read_json(folder / "tokenizer_config.json", missing_ok=True)
    source = settings.get("chat_template")
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        source = own_file.read_text()
    elif isinstance(source, list):
        named = {str(item["name"]): item["template"] for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is None:
        return None
    names = {name: text for name in TEMPLATE_NAMES if (text := _text_of(settings.get(name)))}
    return ChatTemplate(Template(str(source), names), tokenizer)


def _pieces(inner: tokenizers.Tokenizer, decoders: Mapping[str, object], path: Path) -> tuple[bytes, ...]:
    if "ByteLevel" in decoders:
        spell = byte_level_bytes
    elif "ByteFallback" in decoders:
        spell = byte_fallback_bytes
    else:
        found = ", ".join(decoders) or "none"
        raise ModelError(f"{path} declares the decoder {found}; supported are ByteLevel and ByteFallback")
    pieces = {index: spell(text) for text, index in inner.get_vocab(with_added_tokens=False).items()}
    pieces |= {index: token.content.encode() for index, token in inner.get_added_tokens_decoder().items()}
    return tuple(pieces.get(index, b"") for index in range(max(pieces) + 1))


def _decoders(declared: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The decoder's steps by type."""
    decoder = declared.get("decoder")
    if not isinstance(decoder, dict):
        return {}
    steps = decoder.get("decoders", [decoder])
    return {str(step.get("type")): step for step in steps if isinstance(step, dict)}


def _eos_ids(inner: tokenizers.Tokenizer, settings: Mapping[str, object], folder: Path) -> tuple[int, ...]:
    """What ends an answer: ids of generation_config.json, else of config.json; then the tokenizer's own eos."""
    for name in ("generation_config.json", "config.json"):
        declared = read_json(folder / name, missing_ok=True).get("eos_token_id")
        if declared is not None:
            break
    listed = declared if isinstance(declared, list) else [declared]
    own = inner.token_to_id(_text_of(settings.get("eos_token")))
    return tuple(dict.fromkeys(index for index in (*listed, own) if isinstance(index, int)))


def _text_of(token: object) -> str:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
