"""Training a draft head.

Owns what a head starts from, the loss, the order of texts, the learning rate and checkpoints. Does not own the layer,
the chains or the optimizer. Surprising rule: the head learns the target's whole distribution over the kept tokens, not
the token that was drawn; and the gradient of a loss is worked out while its logits are still in the cache.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import EMBEDDING, FINAL_NORM
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.decoder import rms_norm

from .head import DraftHead, DraftWeights, shapes
from .optimizer import Optimizer
from .texts import Text
from .unroll import Batch, Target, unroll

LOSS_ROWS = 256
"""Rows whose logits are worked on at once."""

RIDGE = 1e-3

COOLING = 1 / 3
"""Share of the steps over which the rate falls in the end. Before it a training may be given more steps."""


class Plan(msgspec.Struct, frozen=True):
    """All that a training depends on beside its texts. A step takes texts with `batch` written tokens, and tells apart
    `vocabulary` of the kept tokens. `depths` weigh the losses of each depth, and a share `chains` of the chains gets
    beyond the first guess."""

    steps: int
    seed: int = 1
    batch: int = 1500
    vocabulary: int = 3072
    rate: float = 2e-3
    warmup: int = 10
    depths: tuple[float, ...] = (1.0, 0.8, 0.6)
    chains: float = 0.35
    clip: float = 1.0


def most_used(texts: Sequence[Text], count: int, vocab: int) -> torch.Tensor:
    """The `count` tokens (all, where there are fewer) that the texts' answers use most, int64, rising; the lowest ids
    among equals, since a tokenizer numbers its tokens by how frequent they are."""
    uses = Counter(token for text in texts for token in text.tokens[text.prompt :].tolist())
    return torch.tensor(sorted(sorted(range(vocab), key=lambda token: (-uses[token], token))[:count]))


@torch.no_grad()
def first_head(
    config: ModelConfig, source: WeightSource, kept: torch.Tensor, texts: Sequence[Text], seed: int
) -> DraftHead:
    """What training starts from: `fc` is the best linear guess of the target's next hidden state, and the layer, whose
    outputs are zero, adds nothing to it yet."""
    batch = Batch.of(texts, 1)
    row = batch.chained.nonzero()[:, 0]
    one, eps = torch.ones(config.hidden), config.norm_eps
    states = rms_norm(batch.hidden, one, eps)
    now, wanted = states[row], states[row + 1]
    embedded = rms_norm(source.tensor(EMBEDDING)[batch.after[row, 0]], one, eps)
    norms = {"embedding_norm": 1 / embedded.std(0), "hidden_norm": 1 / now.std(0)}
    read = torch.cat((embedded * norms["embedding_norm"], now * norms["hidden_norm"]), dim=1)
    ridge = torch.eye(2 * config.hidden) * RIDGE * len(row)
    fc = torch.linalg.solve(read.T @ read + ridge, read.T @ wanted).T.contiguous()
    norms |= {
        "output_norm": source.tensor(FINAL_NORM),
        "input_norm": norms["hidden_norm"],
        "mlp_norm": norms["hidden_norm"],
    }
    chance = torch.Generator().manual_seed(seed)
    weights = {
        part: torch.zeros(shape) if part in ("o", "down") else torch.randn(shape, generator=chance) * shape[-1] ** -0.5
        for part, shape in shapes(config).items()
    }
    weights |= {part: norm.clone() for part, norm in norms.items()}
    return DraftHead(config, DraftWeights(**{**weights, "fc": fc}), kept)


class Learner:
    """One training, at any of its steps."""

    def __init__(self, plan: Plan, head: DraftHead, target: Target, texts: Sequence[Text]) -> None:
        self.plan = plan
        self.head = head
        self.step = 0
        self.target = target
        self.tokens = sum(len(text.tokens) for text in texts)
        self.texts = texts
        self._weights = {part: weight.requires_grad_() for part, weight in head.weights.parts().items()}
        states = 1 / head.weights.hidden_norm.detach()
        self._optimizer = Optimizer(self._weights, dict.fromkeys(("fc", "o", "down"), states))
        self._batches = self._order()

    def advance(self) -> list[float]:
        """One step; returns the mean loss of each depth."""
        plan = self.plan
        texts = next(self._batches)
        self.step += 1
        batch = Batch.of([self.texts[index] for index in texts], len(plan.depths))
        chance = torch.Generator().manual_seed(plan.seed * 1_000_003 + self.step)
        go_on = torch.rand(len(batch.hidden), generator=chance) < plan.chains
        kept_rows = self.target.kept_rows[self._columns(batch, chance)]
        with torch.no_grad():
            wanted = (self.target.normalized(batch.hidden) @ kept_rows.T).softmax(-1)
        total, losses = torch.zeros(()), []
        for guess in unroll(self.head, self.target, batch, len(plan.depths), go_on):
            normed = self.head.normalized(guess.given)
            loss = _summed_loss(normed, wanted, guess.row + guess.depth, kept_rows) / max(len(guess.row), 1)
            total = total + plan.depths[guess.depth - 1] * loss
            losses.append(float(loss.detach()))
        found = torch.autograd.grad(total, list(self._weights.values()))
        size = float(torch.stack([gradient.norm() for gradient in found]).norm())
        scale = min(1.0, plan.clip / size)
        gradients = {name: gradient * scale for name, gradient in zip(self._weights, found, strict=True)}
        with torch.no_grad():
            self._optimizer.step(gradients, self._rate(), self.step)
        return losses

    def save(self, path: Path) -> None:
        """Keep everything that training goes on from."""
        partial = path.with_suffix(".partial")
        kept = {"plan": msgspec.to_builtins(self.plan), "step": self.step, "tokens": self.tokens}
        torch.save({**kept, "weights": self._weights, "moments": self._optimizer.state}, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from there. Raises ValueError for a checkpoint of another plan."""
        kept = torch.load(path)
        before = msgspec.convert(kept["plan"], Plan)
        same = msgspec.structs.replace(before, steps=self.plan.steps) == self.plan and kept["tokens"] == self.tokens
        if not same or (before != self.plan and kept["step"] > (1 - COOLING) * min(before.steps, self.plan.steps)):
            raise ValueError(f"{path}: of {kept['tokens']} tokens and {before}, at step {kept['step']}; remove it")
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(kept["weights"][name])
            for name, moment in self._optimizer.state.items():
                moment.copy_(kept["moments"][name])
        self.step, self._batches = kept["step"], self._order()
        for _ in range(self.step):
            next(self._batches)

    def _columns(self, batch: Batch, chance: torch.Generator) -> torch.Tensor:
        """Which of the kept tokens a step tells apart: those of its texts, and others by chance."""
        kept = self.head.kept
        mark = torch.rand(len(kept), generator=chance)
        mark[torch.isin(kept, batch.after)] = 2.0
        return mark.topk(min(self.plan.vocabulary, len(kept))).indices

    def _rate(self) -> float:
        """Rises, stays, and falls in a straight line over the last third."""
        plan = self.plan
        return plan.rate * min(1.0, self.step / plan.warmup, (plan.steps - self.step + 1) / (plan.steps * COOLING))

    def _order(self) -> Iterator[list[int]]:
        """The texts of each step, all of them again and again in another order."""
        draw, batch, tokens = random.Random(self.plan.seed), list[int](), 0
        while True:
            for index in draw.sample(range(len(self.texts)), len(self.texts)):
                batch.append(index)
                tokens += len(self.texts[index].tokens) - self.texts[index].prompt
                if tokens >= self.plan.batch:
                    yield batch
                    batch, tokens = [], 0


class _HeadLoss(torch.autograd.Function):
    """Cross entropy, summed: `wanted` float32[any, kept] are probabilities, of which `row` int64[rows] picks one for
    each of float32[rows, hidden]."""

    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, wanted: torch.Tensor, row: torch.Tensor, kept_rows: torch.Tensor
    ) -> torch.Tensor:
        gradient, total = torch.empty_like(normed), torch.zeros(())
        for begin in range(0, len(normed), LOSS_ROWS):
            here = slice(begin, begin + LOSS_ROWS)
            probabilities = wanted[row[here]]
            logprobs = (normed[here] @ kept_rows.T).log_softmax(-1)
            total -= torch.linalg.vecdot(probabilities, logprobs).sum()
            gradient[here] = logprobs.exp_().sub_(probabilities) @ kept_rows
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return above[0] * gradient, None, None, None


def _summed_loss(
    normed: torch.Tensor, wanted: torch.Tensor, row: torch.Tensor, kept_rows: torch.Tensor
) -> torch.Tensor:
    loss: torch.Tensor = _HeadLoss.apply(normed, wanted, row, kept_rows)  # type: ignore[no-untyped-call]
    return loss
