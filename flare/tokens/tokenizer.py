"""Text to token ids and back.

Owns `Tokenizer`, a thin face over the `tokenizers` library, the same for every file format (`from_gguf`, `from_hf`).
Does not own streaming (`assembler`) or chat templates (`chat`). Surprising rule: a special token that is spelled out in
text becomes a control token only with `parse_special=True`; otherwise its characters are ordinary tokens. Bytes are
the truth of a token: text is only ever made by joining bytes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a file says of its tokens. `pieces` are raw bytes by id (empty for an id without a token); `special` are
    control tokens by id with their text; `eos_ids` end an answer; `add_bos` is the model's default. `leading_space`:
    encoding puts a space before the text, so that decoding takes one off."""

    pieces: tuple[bytes, ...]
    special: dict[int, str]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    leading_space: bool = False


class Encoded(NamedTuple):
    """Token ids, and for each the exclusive end of its characters in the text."""

    ids: list[int]
    ends: list[int]


class Tokenizer:
    """Encoding and decoding for one model. Immutable and safe to use from several threads."""

    def __init__(self, build: Callable[[], tokenizers.Tokenizer], vocabulary: Vocabulary) -> None:
        """`build` is called twice: whether special tokens are parsed is a setting of the library's object."""
        self._parsing, self._literal = build(), build()
        self._literal.encode_special_tokens = True
        for inner in (self._parsing, self._literal):
            inner.no_truncation()
            inner.no_padding()
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces
        texts = sorted(vocabulary.special.values(), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have a meaning; a model's output may be padded beyond."""
        return len(self._pieces)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer; the first is the principal one."""
        return self._vocabulary.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def special_texts(self) -> Iterable[str]:
        return self._vocabulary.special.values()

    @property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any control token spelled out, the longest first."""
        return self._special_pattern

    def encode(self, text: str, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. `add_bos` None: as the model's files say. Lone surrogates become U+FFFD."""
        ids: list[int] = self._encoding(text, parse_special).ids
        wanted = self._vocabulary.add_bos if add_bos is None else add_bos
        return [self.bos_id, *ids] if wanted and self.bos_id is not None else ids

    def encode_with_ends(self, text: str, parse_special: bool) -> Encoded:
        """Like `encode` without bos, with the end of each token in the characters of `text`."""
        encoding = self._encoding(text, parse_special)
        return Encoded(encoding.ids, [end for _, end in encoding.offsets])

    def _encoding(self, text: str, parse_special: bool) -> tokenizers.Encoding:
        inner = self._parsing if parse_special else self._literal
        # The batch call lets other threads have the interpreter while it works; a long text would stall the event loop.
        return inner.encode_batch([replace_surrogates(text)], add_special_tokens=False)[0]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Joined bytes as UTF-8, each maximal bad sequence as one U+FFFD. Unknown ids have no bytes."""
        joined = b"".join([self.token_bytes(token) for token in ids if not (skip_special and self.is_special(token))])
        if self._vocabulary.leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Raw bytes of a token, not always whole characters; a special token's are its text. Empty if unknown."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def token_text(self, token: int) -> str:
        """The token alone as text, for people; U+FFFD where it is no whole character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.special


def replace_surrogates(text: str) -> str:
    """`text` with paired surrogates joined and lone ones as U+FFFD, so that it can be encoded."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def byte_level_bytes(text: str) -> bytes:
    """Bytes of a token as byte-level BPE spells them (https://github.com/openai/gpt-2, `bytes_to_unicode`)."""
    return text.translate(_BYTE_LEVEL).encode("latin-1")


def _byte_level_table() -> dict[int, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_table()


def byte_fallback_bytes(text: str) -> bytes:
    """Bytes of a token as SentencePiece spells them: `<0x0A>` is one byte, and U+2581 is a space."""
    if len(text) == 6 and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)):
        return bytes.fromhex(match[1])
    return text.replace("\u2581", " ").encode()
