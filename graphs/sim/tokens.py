"""Synthetic tokens: what the simulated device draws and scores in place of a model.

Owns a pure function from (prompt, seed, position) to a token and to log-probabilities. Does not own request rows.
Surprising rule: a stop token is never drawn by chance. It comes where `eos_at` says, or where a logit bias of +100
forces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..frames import Binding, TokenScore

HASH_MASK = (1 << 64) - 1
"""Hashes are integers modulo 2**64."""

_FORCING_BIAS = 100.0

EosAt = Callable[[int, int, int], bool]
"""(hash of the prompt, prompt tokens, index of the output token from 0) -> whether that token ends the row."""


def never(_prompt_hash: int, _prompt_tokens: int, _output_index: int) -> bool:
    """Rows end by length alone."""
    return False


def mix(value: int) -> int:
    """The splitmix64 finalizer: a bijection of 64-bit integers whose bits all depend on all bits of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & HASH_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & HASH_MASK
    return value ^ (value >> 31)


def hash_tokens(tokens: NDArray[np.int32], start: int) -> int:
    """Hash of a chunk at position `start`; the sum of the chunks' hashes modulo 2**64 is the hash of the prompt."""
    position = np.arange(start + 1, start + 1 + len(tokens), dtype=np.uint64)
    value = tokens.astype(np.uint64) + position * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int(np.add.reduce(value ^ (value >> np.uint64(31)), dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class DrawRules:
    """What a binding says about drawing, worked out once.

    `key` stands for both seeds (the request's is left out when greedy). `forced` are tokens with a bias of +100,
    `undrawn` those that chance may not draw: stop tokens and tokens with a bias of -100, which `forbidden` holds alone.
    """

    key: int
    stop_tokens: tuple[int, ...]
    forced: tuple[int, ...]
    forbidden: frozenset[int]
    undrawn: frozenset[int]
    uses_counts: bool


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A vocabulary and a seed. Tokens come from `alphabet`; `eos_at` must be pure."""

    alphabet: Sequence[int] = range(256)
    seed: int = 0
    eos_at: EosAt = never

    def rules(self, binding: Binding) -> DrawRules:
        """The rules of a fresh generation."""
        sampling = binding.sampling
        forbidden = frozenset(token for token, bias in sampling.logit_bias if bias <= -_FORCING_BIAS)
        return DrawRules(
            key=mix(self.seed + 1) ^ (0 if sampling.temperature == 0 else mix(mix(sampling.seed + 1))),
            stop_tokens=binding.stop_tokens,
            forced=tuple(token for token, bias in sampling.logit_bias if bias >= _FORCING_BIAS),
            forbidden=forbidden,
            undrawn=forbidden.union(binding.stop_tokens),
            uses_counts=sampling.penalised,
        )

    def draw(
        self, rules: DrawRules, prompt_hash: int, prompt_tokens: int, output_index: int, banned: Set[int]
    ) -> int | None:
        """The output token at position `prompt_tokens + output_index`; None if no token may be drawn."""
        if rules.stop_tokens and self.eos_at(prompt_hash, prompt_tokens, output_index):
            allowed = [token for token in rules.stop_tokens if token not in banned and token not in rules.forbidden]
            if allowed:
                return allowed[0]
        value = mix((prompt_hash ^ rules.key) + (prompt_tokens + output_index) * 0x9E3779B97F4A7C15 & HASH_MASK)
        if rules.forced:
            forced = [token for token in rules.forced if token not in banned]
            if forced:
                return forced[value % len(forced)]
        size = len(self.alphabet)
        for step in range(size):
            token = self.alphabet[(value + step) % size]
            if token not in rules.undrawn and token not in banned:
                return token
        return None

    def score(self, token: int, position: int, alternatives: int) -> TokenScore:
        """A made-up score of `token` at `position`: it is the likeliest, and `alternatives` (itself the first) fall
        by one nat each."""
        logprob = -1.0 - (mix(token * 0x9E3779B97F4A7C15 + position & HASH_MASK) % 1000) / 1000
        others = (other for other in self.alphabet if other != token)
        top = [(token, logprob)] if alternatives else []
        top.extend((other, logprob - rank - 1) for rank, other in zip(range(alternatives - 1), others, strict=False))
        return TokenScore(logprob, tuple(top))
