"""The architecture of a model, whatever file it came from.

Owns the numbers that a program needs to run a decoder of the Llama family (Llama, SmolLM2, Mistral, Qwen2, dense
Qwen3). Does not own weights or file formats. Surprising rule: the family is told by the flags alone; a program never
looks at `architecture`, which is for messages.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched for contexts longer than those of training.

    `linear` divides all frequencies by `factor`. `llama3` divides those whose wavelength exceeds
    `original_max_positions / low_freq_factor`, keeps those below `original_max_positions / high_freq_factor`, and
    blends between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer with RMSNorm, rotary positions, grouped query attention and a SwiGLU MLP.

    `qkv_bias`, `output_bias` and `mlp_bias` tell which projections have biases; `qk_norm`: queries and keys are
    normalized per head before rotation. `sliding_window` is the number of positions a token sees, itself included
    (None: all before it). Units are elements.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no program can run, naming the field."""
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"model config: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim is {self.head_dim}; rotary positions need an even number")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"model config: sliding_window is {self.sliding_window}; it must be at least 1")
