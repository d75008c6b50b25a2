"""Rotary positions: the table of cosines and sines that both the torch and the native program read.

Owns the frequencies. Surprising rule: the table is in Hugging Face order, so that element i of a head is rotated with
element i + head_dim / 2, never with its neighbour.
"""

from __future__ import annotations

import math

import torch

from .config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angular frequencies, float32[head_dim / 2], with the config's scaling applied (RoFormer; Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies: torch.Tensor = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotary_table(config: ModelConfig, positions: int) -> torch.Tensor:
    """Cosines and sines of positions 0..positions-1, float32[positions, 2, head_dim / 2]."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(config))
    return torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()


def rotate(heads: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate float32[rows, heads, head_dim] by the table's rows, float32[rows, 2, head_dim / 2]."""
    cos, sin = table[:, 0, None, :], table[:, 1, None, :]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
