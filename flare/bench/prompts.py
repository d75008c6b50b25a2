"""Prompts of a given size.

Owns the seeded generator of distinct English prompts and their sizing. Does not own what is done with them. Surprising
rule: prompts are sized by the server's own tokenizer where it has a /tokenize (as vLLM and llama-server do); elsewhere
one word is taken for one token, and the size is only about right.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from importlib import resources

import msgspec

from .http import HttpError, Server, fetch

CountTokens = Callable[[str], Awaitable[int]]

_SENTENCE_WORDS = (7, 14)


class _Tokens(msgspec.Struct):
    tokens: list[int]


def text(generator: random.Random, words: int) -> list[str]:
    """`words` words of English as sentences: the first word of each is capitalised, its last has a full stop."""
    vocabulary = resources.files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split()
    chosen = generator.choices(vocabulary, k=words)
    begin = 0
    while begin < words:
        end = min(begin + generator.randint(*_SENTENCE_WORDS), words)
        chosen[begin] = chosen[begin].capitalize()
        chosen[end - 1] += "."
        begin = end
    return chosen


class PromptMaker:
    """Makes distinct prompts from a seed, each of `tokens` tokens as `count_tokens` counts them."""

    def __init__(self, seed: int, count_tokens: CountTokens | None) -> None:
        self._generator = random.Random(seed)
        self._count_tokens = count_tokens

    @property
    def sized_by_server(self) -> bool:
        """Whether sizes are exact."""
        return self._count_tokens is not None

    async def make(self, tokens: int) -> str:
        """A new prompt. Its size is exact wherever some number of words gives it, else the nearest below."""
        chosen = text(self._generator, 2 * tokens)
        if self._count_tokens is None:
            return " ".join(chosen[:tokens])
        fits, exceeds, size = 0, len(chosen) + 1, tokens
        while fits + 1 < exceeds:
            count = await self._count_tokens(" ".join(chosen[:size]))
            if count == tokens:
                return " ".join(chosen[:size])
            fits, exceeds = (size, exceeds) if count < tokens else (fits, size)
            size = min(max(size + tokens - count, fits + 1), exceeds - 1)
        return " ".join(chosen[: max(1, fits)])


async def find_tokenizer(server: Server, model: str) -> CountTokens | None:
    """How to count tokens through the server's /tokenize, in vLLM's form or llama-server's; None if it has none."""
    for key in ("prompt", "content"):

        async def count(prompt: str, key: str = key) -> int:
            body = msgspec.json.encode({"model": model, key: prompt})
            status, answer = await fetch(server, "POST", "/tokenize", body)
            if status != 200:
                raise HttpError(f"/tokenize answered with HTTP {status}")
            return len(msgspec.json.decode(answer, type=_Tokens).tokens)

        try:
            if await count("One two three.") > 0:
                return count
        except (HttpError, msgspec.DecodeError):
            continue
    return None
