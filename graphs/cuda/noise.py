"""Counter-based noise, many draws at a time.

Owns what `programs.noise` defines, bit for bit, over tensors. Surprising rule: torch's 64-bit integers are signed;
products wrap as unsigned ones do, and a shift to the right is masked.
"""

from __future__ import annotations

import torch

from ..programs.noise import DRAFT_SALT

_GOLDEN = 0x9E3779B97F4A7C15
_JUDGE_SALT = 0x3C6EF372FE94F82B
_MASK32 = (1 << 32) - 1


def draw_keys(seeds: torch.Tensor, positions: torch.Tensor, *, drafts: bool = False) -> torch.Tensor:
    """The 64-bit key of each draw, int64[n]: its low and high half are the two keys of `programs.noise.draw_key`.
    `drafts`: of proposals that are accepted by their probability."""
    z = _mix64((seeds ^ DRAFT_SALT if drafts else seeds) + _signed(_GOLDEN))
    return _mix64(z + _signed(_GOLDEN) * (positions + 1))


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel variates float32[n, m] of each draw's key int64[n] and token int64[m]."""
    keys = keys[:, None]
    h = _mix32((tokens + (keys & _MASK32)) & _MASK32)
    h = _mix32(h ^ _shifted(keys, 32))
    v = (h.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-v))).to(torch.float32)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """A uniform variate in [0, 1) of each draw's key, float64[n]."""
    return _shifted(_mix64(keys ^ _JUDGE_SALT), 11).to(torch.float64) * 2.0**-53


def _signed(constant: int) -> int:
    """The same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Unsigned z >> by."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _mix32(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)
