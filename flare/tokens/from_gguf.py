"""A `Tokenizer` rebuilt from the metadata of a GGUF file.

Owns llama.cpp's `tokenizer.ggml.…` keys: byte-level BPE with its named pre-tokenizer, and SentencePiece BPE with byte
fallback. Surprising rule: a pre-tokenizer is only a name in the file; its pattern is known here or it is refused,
for another pattern would give other tokens without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from flare.graphs.weights.errors import ModelError

from .chat import ChatTemplate
from .template import Template
from .tokenizer import Tokenizer, Vocabulary, byte_fallback_bytes, byte_level_bytes

T = TypeVar("T", str, int, float)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""llama.cpp's token types that matter here."""

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = WORDS + r"\p{N}{1,3}" + REST
QWEN2_SPLIT = WORDS + r"\p{N}" + REST

GPT2_NAMES = ("gpt-2", "default")
SMOLLM_NAMES = ("smollm",)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
PRE_TOKENIZERS = (*GPT2_NAMES, *SMOLLM_NAMES, *LLAMA3_NAMES, *QWEN2_NAMES)

TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
"""Control tokens that end an answer in chat even where the file's eos is another."""

TEMPLATE_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Tokens(NamedTuple):
    """The vocabulary as the file lists it: texts and types by id, control tokens, and tokens the model's author added,
    which are never split but are ordinary otherwise."""

    texts: list[str]
    types: list[int]
    special: dict[int, str]
    own: dict[int, str]


class _Scheme(NamedTuple):
    """How text becomes tokens: a constructor for the library's object, the spelling of bytes, and two defaults."""

    build: Callable[[], tokenizers.Tokenizer]
    spell: Callable[[str], bytes]
    add_bos: bool
    leading_space: bool


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Raises `ModelError` for a tokenizer model or pre-tokenizer that is not supported, or damaged metadata."""
    tokens = _tokens(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        scheme = _byte_level(metadata, tokens)
    elif model == "llama":
        scheme = _sentencepiece(metadata, tokens)
    else:
        raise ModelError(f"the GGUF tokenizer model {model!r} is not supported; these are: gpt2, llama (SentencePiece)")
    literal = tokens.special | tokens.own
    try:
        vocabulary = Vocabulary(
            pieces=tuple(
                literal[index].encode() if index in literal else scheme.spell(text)
                for index, text in enumerate(tokens.texts)
            ),
            special=tokens.special,
            eos_ids=_eos_ids(metadata, tokens),
            bos_id=_token_id(metadata, "bos", tokens),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", scheme.add_bos)),
            leading_space=scheme.leading_space,
        )
        return Tokenizer(scheme.build, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"the tokenizer in the GGUF file cannot be rebuilt: {error}") from error


def chat_template_from_gguf(metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in the file; None if it has none. Raises `ModelError`."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TEMPLATE_NAMES.items()}
    names = {name: tokenizer.token_text(index) for name, index in ids.items() if isinstance(index, int)}
    return ChatTemplate(Template(str(source), names), tokenizer)


def _tokens(metadata: Mapping[str, object]) -> _Tokens:
    texts, types = _list(metadata, "tokens", str), _list(metadata, "token_type", int)
    if len(texts) != len(types):
        raise ModelError(f"the GGUF file lists {len(texts)} tokens but {len(types)} token types")
    special = {index: texts[index] for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    own = {index: texts[index] for index, kind in enumerate(types) if kind == USER_DEFINED}
    return _Tokens(texts, types, special, own)


def _byte_level(metadata: Mapping[str, object], tokens: _Tokens) -> _Scheme:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"the GGUF pre-tokenizer {pre!r} is not supported; these are: {', '.join(PRE_TOKENIZERS)}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _list(metadata, "merges", str))]

    def build() -> tokenizers.Tokenizer:
        vocab = {text: index for index, text in enumerate(tokens.texts)}
        inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in LLAMA3_NAMES))
        inner.pre_tokenizer = _splitter(pre)
        if pre in QWEN2_NAMES:
            inner.normalizer = normalizers.NFC()
        return _with_added(inner, tokens)

    return _Scheme(build, byte_level_bytes, add_bos=pre in LLAMA3_NAMES, leading_space=False)


def _splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in SMOLLM_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT if pre in LLAMA3_NAMES else QWEN2_SPLIT), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, object], tokens: _Tokens) -> _Scheme:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens.texts):
        raise ModelError(f"the GGUF file lists {len(tokens.texts)} tokens but {len(scores)} scores")
    merges = _merges(tokens, scores)
    unknown = next((tokens.texts[index] for index, kind in enumerate(tokens.types) if kind == UNKNOWN), None)
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))

    def build() -> tokenizers.Tokenizer:
        vocab = {text: index for index, text in enumerate(tokens.texts)}
        inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        steps: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if add_space else []
        inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
        return _with_added(inner, tokens)

    return _Scheme(build, byte_fallback_bytes, add_bos=True, leading_space=add_space)


def _merges(tokens: _Tokens, scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes, best first: any two ordinary pieces whose union is one too, by its score."""
    vocab = {text: index for index, text in enumerate(tokens.texts) if tokens.types[index] == NORMAL}
    ranked = [
        (-scores[whole], -cut, vocab[text[:cut]], text[:cut], text[cut:])
        for text, whole in vocab.items()
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _with_added(inner: tokenizers.Tokenizer, tokens: _Tokens) -> tokenizers.Tokenizer:
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens.special.values()])
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in tokens.own.values()])
    return inner


def _eos_ids(metadata: Mapping[str, object], tokens: _Tokens) -> tuple[int, ...]:
    declared = [_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    named = [index for index, text in tokens.special.items() if text in TURN_ENDS]
    return tuple(dict.fromkeys(index for index in (*declared, *named) if index is not None))


def _token_id(metadata: Mapping[str, object], name: str, tokens: _Tokens) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens.texts):
        raise ModelError(f"the GGUF file names token {index!r} as {name}, which is not in its vocabulary")
    return index


def _list(metadata: Mapping[str, object], key: str, kind: type[T]) -> list[T]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ModelError(f"the GGUF file lacks a list of {kind.__name__} under tokenizer.ggml.{key}")
    return values
