"""How weights move: Muon for matrices, Adam for norms.

Owns one step and its state. Does not own gradients or the learning rate. Surprising rule: Muon's orthogonal factor is
found in float32, since bfloat16 is slow on most CPUs (Jordan, 2024; sizes of steps as Adam's, Liu et al., 2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPS = 1e-8

_ITERATIONS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ADAM_RMS = 0.2


class Optimizer:
    """Moves float32 weights in place. `state` is all that a checkpoint has to keep. `scales` float32[out] are of some
    matrices how large their outputs are: their rows move in proportion."""

    def __init__(self, weights: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._scales = {name: scale[:, None] for name, scale in scales.items()}
        self.state = {
            f"{name}.{moment}": torch.zeros_like(weight)
            for name, weight in weights.items()
            for moment in (("first",) if weight.ndim == 2 else ("first", "second"))
        }

    def step(self, gradients: Mapping[str, torch.Tensor], rate: float, count: int) -> None:
        """Step number `count`, from 1 on."""
        for name, weight in self._weights.items():
            gradient, first = gradients[name], self.state[f"{name}.first"]
            if weight.ndim == 2:
                scale = self._scales.get(name, torch.ones(()))
                gradient = gradient * scale
                first.mul_(MOMENTUM).add_(gradient)
                update = scale * orthogonal(gradient + MOMENTUM * first)
                weight.sub_(rate * _ADAM_RMS * max(weight.shape) ** 0.5 * update)
            else:
                second = self.state[f"{name}.second"]
                first.lerp_(gradient, 1 - BETAS[0])
                second.lerp_(gradient.square(), 1 - BETAS[1])
                size = (second / (1 - BETAS[1] ** count)).sqrt() + EPS
                weight.sub_(rate / (1 - BETAS[0] ** count) * first / size)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values about 1, by five Newton-Schulz iterations."""
    a, b, c = _QUINTIC
    x: torch.Tensor
    tall = len(matrix) > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x
