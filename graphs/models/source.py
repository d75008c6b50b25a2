"""Where a program gets its weights from.

Owns the protocol alone. Does not own files or formats (`graphs/weights` does). Surprising rule: names and layouts are
those of Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`, `[out, in]`), whatever the file says; rows
of rotary projections are in Hugging Face order too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Int4Groups(NamedTuple):
    """A matrix stored in four bits: `w[o, i] = scale[o, i // 32] * q[o, i] + minimum[o, i // 32]`, exactly.

    `q` uint8[out, in] with values 0..15; `scale` and `minimum` float32[out, in / 32], each exact in float16.
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


class WeightSource(Protocol):
    """Reads weights by name. A tensor may be read more than once; the caller owns what it gets."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as float32. Raises KeyError, naming it, if the model has none of that name."""
        ...

    def int4_group32(self, name: str) -> Int4Groups | None:
        """The matrix as it is stored, if it is stored in groups of 32 four-bit values (Q4_0, Q4_1); else None."""
        ...
