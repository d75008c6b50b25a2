"""Tokens of one answer, assembled into text that can be sent.

Owns streamed detokenizing and stop strings. Does not own stop tokens (the device) or counting. Surprising rule: text is
held back only while it may still turn out to be part of a character or of a stop string; all else leaves at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .tokenizer import Tokenizer

SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
"""Never the beginning of a character, though Python's decoder waits for a third byte to say so."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` to send now. `offsets`: for each token pushed, the index of the first character that has bytes of it, in
    the whole visible text. `stopped_by`: the stop string that ended the answer, once found."""

    text: str
    offsets: tuple[int, ...]
    stopped_by: str | None = None


class TextAssembler:
    """Joins bytes of tokens to valid UTF-8 and cuts before the first stop string.

    A bad sequence becomes one U+FFFD as soon as it cannot be completed. Among stop strings the one that begins first
    wins, at equal beginnings the shortest, however the tokens were grouped; so text is awaited while an earlier one
    may still be completed. Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Raises `ValueError` for an empty stop string."""
        if not all(stop):
            raise ValueError("stop: an empty string would stop everywhere")
        self._token_bytes = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        self._utf8 = _utf8_decoder("replace")
        self._pending = b""
        """The beginning of a character, which the decoder keeps."""
        self._chars = 0
        """Characters decoded so far; those held back are among them."""
        self._stop = tuple(sorted(stop, key=len))
        self._stop_pattern = re.compile("|".join(map(re.escape, self._stop))) if stop else None
        self._stop_begins = frozenset(text[0] for text in stop)
        self._held = ""
        self._stopped_by: str | None = None

    @property
    def stopped_by(self) -> str | None:
        return self._stopped_by

    @property
    def characters(self) -> int:
        """Characters of the visible text so far; those held back are among them."""
        return self._chars

    def push(self, tokens: Sequence[int], final: bool = False) -> Piece:
        """Take tokens and return the text that can leave. `final` flushes what is held. After a stop or the final
        push nothing more comes out."""
        if self._stopped_by is not None:
            return Piece("", (self._chars,) * len(tokens), self._stopped_by)
        decoded = ""
        offsets = []
        for token in tokens:
            offset = self._chars
            if not self._is_special(token):
                text, broken = self._decode(self._token_bytes(token))
                offset += broken
                self._chars += len(text)
                decoded += text
            offsets.append(offset)
        if final:
            text = self._utf8.decode(b"", True)
            self._chars += len(text)
            decoded += text
        if self._stop_pattern is None:
            return Piece(decoded, tuple(offsets))
        return self._cut(self._stop_pattern, self._held + decoded, offsets, final)

    def _decode(self, piece: bytes) -> tuple[str, int]:
        """The characters that `piece` completes, and how many of them were pending and are not its own: those of a
        sequence that its first byte broke."""
        pending = self._pending
        if not pending:
            return piece.decode("ascii") if piece.isascii() else self._feed(piece), 0
        head = self._feed(piece[:1])
        broken = len(pending.decode("utf-8", "replace")) if head and head.encode() != pending + piece[:1] else 0
        return head + self._feed(piece[1:]), broken

    def _feed(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._pending, _ = self._utf8.getstate()
        if SURROGATE.fullmatch(self._pending):
            self._pending = b""
            return text + self._utf8.decode(b"", True)
        return text

    def _cut(self, pattern: re.Pattern[str], text: str, offsets: list[int], final: bool) -> Piece:
        """Split `text`, all that has not left, into what leaves now and what is held."""
        found = pattern.search(text)
        held_from = len(text) if final else self._held_from(text)
        if found is None or held_from < found.start():
            self._held = text[held_from:]
            return Piece(text[:held_from], tuple(offsets))
        self._stopped_by = found[0]
        self._chars -= len(text) - found.start()
        self._held = ""
        return Piece(text[: found.start()], tuple([min(offset, self._chars) for offset in offsets]), found[0])

    def _held_from(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string."""
        if self._stop_begins.isdisjoint(text):
            return len(text)
        for begin in range(max(0, len(text) - len(self._stop[-1]) + 1), len(text)):
            if text[begin] in self._stop_begins:
                suffix = text[begin:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stop):
                    return begin
        return len(text)
