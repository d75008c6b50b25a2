"""Log-probabilities in OpenAI's two shapes.

Owns how a token is shown. Does not own the numbers. Surprising rule: a token that is not valid UTF-8 by itself is shown
as `bytes:\\xe6\\x97`, as OpenAI does, so that two such tokens never share a key.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from flare.request import ScoredToken

from .context import TextTokenizer

LOGPROB_MIN = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_string(raw: bytes) -> str:
    """A token as text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: TextTokenizer, tokens: Sequence[ScoredToken]) -> dict[str, object]:
    """`choices[].logprobs` of chat: one entry a token."""
    content: list[dict[str, object]] = []
    for token in tokens:
        entry = _chat_entry(tokenizer, token.token_id, token.logprob)
        entry["top_logprobs"] = [_chat_entry(tokenizer, token_id, logprob) for token_id, logprob in token.top]
        content.append(entry)
    return {"content": content}


def completion_logprobs(
    tokenizer: TextTokenizer, tokens: Sequence[ScoredToken], offsets: Sequence[int], alternatives: int
) -> dict[str, object]:
    """`choices[].logprobs` of completions: four lists, one item a token.

    `offsets` count characters from the start of the prompt. `top_logprobs` also holds the token itself, and is null
    where no alternatives were asked for.
    """
    names = [token_string(tokenizer.token_bytes(token.token_id)) for token in tokens]
    tops: list[dict[str, float] | None] | None = None
    if alternatives:
        tops = [_alternatives(tokenizer, token, name) for token, name in zip(tokens, names, strict=True)]
    return {
        "tokens": names,
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def text_offsets(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> list[int]:
    """The index of each token's first character in the text that the tokens spell."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    characters = 0
    for token_id in token_ids:
        offsets.append(characters)
        characters += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


def _alternatives(tokenizer: TextTokenizer, token: ScoredToken, name: str) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in token.top:
        top.setdefault(token_string(tokenizer.token_bytes(token_id)), _finite(logprob))
    top.setdefault(name, _finite(token.logprob))
    return top


def _chat_entry(tokenizer: TextTokenizer, token_id: int, logprob: float | None) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    number = LOGPROB_MIN if logprob is None else _finite(logprob)
    return {"token": token_string(raw), "logprob": number, "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)
