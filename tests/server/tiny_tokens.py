"""A tokenizer and a template small enough to reason about: a token a byte, and ChatML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flare.request import Endpoints
from flare.tokens.template import TemplateError

IM_START, IM_END = 256, 257
SPECIAL = {IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}
VOCAB_SIZE = 258
TOKEN_BYTES_MAX = 12


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 and 257 are ChatML's marks."""

    def encode(self, text: str, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        ids = list(text.encode())
        if not parse_special:
            return ids
        for token_id, mark in SPECIAL.items():
            start = _find(ids, mark)
            while start is not None:
                ids[start : start + len(mark)] = [token_id]
                start = _find(ids, mark)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [token_id for token_id in ids if not (skip_special and token_id in SPECIAL)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL.get(token_id) or bytes([token_id])


@dataclass(frozen=True)
class Rendered:
    tokens: tuple[int, ...]
    endpoints: Endpoints


class TinyChat:
    """ChatML without a default system prompt. The role `bad` raises, as a template's raise_exception does."""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> Rendered:
        tokens: list[int] = []
        ends: list[int] = []
        for message in messages:
            if message["role"] == "bad":
                raise TemplateError("roles must not be bad")
            tokens += [IM_START, *f"{message['role']}\n{message['content']}".encode(), IM_END]
            ends.append(len(tokens))
        if add_generation_prompt:
            tokens += [IM_START, *b"assistant\n"]
        system_end = ends[0] if messages[0]["role"] == "system" else 0
        return Rendered(tuple(tokens), Endpoints(system_end, tuple(ends)))


def _find(ids: list[int], mark: bytes) -> int | None:
    for start in range(len(ids) - len(mark) + 1):
        if ids[start : start + len(mark)] == list(mark):
            return start
    return None
