"""Tiny vocabularies, and slow tokenizers to compare the real ones with.

Owns GGUF metadata and a tokenizer.json of byte-level BPE, GGUF metadata of SentencePiece, and oracles written from
the definition of each: merge the best adjacent pair until none is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import regex  # type: ignore[import-untyped]
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
}
"""llama.cpp's patterns by the name of the pre-tokenizer, applied one after the other."""

MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "o r",
    "Ġw or",
    "l d",
    "Ġwor ld",
    "Ċ Ċ",
    "1 2",
    "12 3",
    "Ġ Ġ",
    "i m",
    "< |",
]


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters, following = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(following))
            following += 1
    return letters


def byte_level_tokens(merges: Iterable[str] = MERGES) -> list[str]:
    """256 bytes, then what each merge makes."""
    return [*byte_letters(), *(merge.replace(" ", "") for merge in merges)]


def byte_level_metadata(special: list[str], pre: str = "gpt-2", own: list[str] | None = None) -> dict[str, object]:
    """GGUF metadata; `special` and then `own` tokens come last. The first special token is bos, the last is eos."""
    ordinary = byte_level_tokens()
    own = own or []
    tokens = [*ordinary, *special, *own]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(ordinary) + [CONTROL] * len(special) + [USER_DEFINED] * len(own),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": len(ordinary),
        "tokenizer.ggml.eos_token_id": len(ordinary) + len(special) - 1,
    }


def byte_level_json(special: list[str], bos: str | None = None) -> str:
    """A tokenizer.json of the same vocabulary; with `bos`, its post-processor puts that token first."""
    vocab = {text: index for index, text in enumerate(byte_level_tokens())}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if bos is not None:
        index = inner.token_to_id(bos)
        inner.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, index)])
    text: str = inner.to_str()
    return text


def byte_level_oracle(metadata: Mapping[str, object], text: str) -> list[int]:
    """Byte-level BPE of text without special tokens, slowly."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    pre = str(metadata["tokenizer.ggml.pre"])
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
    letters = byte_letters()
    pieces = [text]
    for pattern in SPLITS[pre]:
        pieces = [part for piece in pieces for part in _isolated(pattern, piece)]
    found: list[int] = []
    for piece in pieces:
        word = "".join(letters[byte] for byte in piece.encode())
        if pre == "llama-bpe" and word in ids:
            found.append(ids[word])
        else:
            found += [ids[part] for part in _merged(list(word), lambda pair: ranks.get(pair))]
    return found


def _isolated(pattern: str, text: str) -> list[str]:
    """`text` cut at both ends of every match."""
    cuts = sorted({0, len(text), *(end for match in regex.finditer(pattern, text) for end in match.span())})
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _merged(parts: list[str], rank: Callable[[tuple[str, str]], float | None]) -> list[str]:
    while True:
        ranked = [(r, at) for at, pair in enumerate(pairwise(parts)) if (r := rank(pair)) is not None]
        if not ranked:
            return parts
        _, at = min(ranked)
        parts = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]


def sentencepiece_metadata() -> dict[str, object]:
    """GGUF metadata of a SentencePiece model: unk, bos, eos, 256 bytes, then pieces with scores."""
    pieces = ["▁h", "he", "ll", "hello", "▁hello", "hell", "o▁", "▁w", "▁wor", "ld", "or", "▁▁", *"▁helowrdab."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_oracle(metadata: Mapping[str, object], text: str) -> list[int]:
    """SentencePiece BPE of non-empty text, slowly: the pair whose union scores best first, bytes for the rest."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    ids = {token: index for index, token in enumerate(tokens) if index >= 259}

    def rank(pair: tuple[str, str]) -> float | None:
        whole = ids.get(pair[0] + pair[1])
        known = whole is not None and pair[0] in ids and pair[1] in ids
        return -scores[whole] if known and whole is not None else None

    found: list[int] = []
    for part in _merged(list("▁" + text.replace(" ", "▁")), rank):
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found
