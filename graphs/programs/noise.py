"""Counter-based noise: what makes a draw depend on seed and position alone.

Owns the hash from (seed, position, token) to a standard Gumbel variate. Surprising rule: there is no generator and no
state; the noise of one token of one position is a pure function, the same in every batch and on every machine.
"""

from __future__ import annotations

import torch

DRAFT_SALT = 0x6A09E667F3BCC909
"""Turns a seed into that of proposals which are accepted by their probability."""

_JUDGE_SALT = 0x3C6EF372FE94F82B
_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a draw: SplitMix64 of the seed advanced by the position (Steele, Lea and Flood, 2014)."""
    z = _mix64((seed + 0x9E3779B97F4A7C15) & _MASK64)
    z = _mix64((z + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK64)
    return z & _MASK32, z >> 32


def gumbel(key: tuple[int, int], tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel variates of int64 token ids, float32, finite or -inf.

    -log(E) with E = -log(1 - v) exponential and v uniform: for small v, which decide most draws, E keeps float32's
    relative precision.
    """
    h = _mix32((tokens + key[0]) & _MASK32)
    h = _mix32(h ^ key[1])
    v = (h.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-v))).to(torch.float32)


def uniform(key: tuple[int, int]) -> float:
    """A uniform variate in [0, 1) of a draw, independent of its Gumbel variates: what a proposal is judged by."""
    return (_mix64((key[0] | key[1] << 32) ^ _JUDGE_SALT) >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _mix32(h: torch.Tensor) -> torch.Tensor:
    """A 32-bit finalizer over int64 tensors that hold 32-bit values (Wellons' lowbias32)."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)
