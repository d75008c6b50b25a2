"""The head over whole texts: each position in turn begins a chain of guesses, all chains at once.

Owns batches of texts and the attention of chains. Does not own the layer (`DraftHead`), losses or counts. Surprising
rule: a chain is fed the text's own tokens, not the guesses; up to the first wrong guess these are the same, and what
comes after one is never accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flare.graphs.models.draft import EMBEDDING, FINAL_NORM
from flare.graphs.models.rope import rotary_table
from flare.graphs.models.source import WeightSource
from flare.graphs.programs.decoder import head_name, rms_norm

from .head import DraftHead
from .texts import LENGTH_MAX, Text


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side. A row is a position whose residual is known: `hidden` float32[rows, hidden], `position`
    int64[rows]; `first` is the first row of each text and the end of the last. `after` int64[rows, depth] are the
    tokens that follow each row, -1 beyond the text's end; `chained` bool[rows] where a chain may begin."""

    texts: Sequence[Text]
    hidden: torch.Tensor
    position: torch.Tensor
    after: torch.Tensor
    chained: torch.Tensor
    first: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[Text], depth: int) -> Batch:
        """Chains of up to `depth` guesses, from the last token of the prompt on."""
        after, position, chained, first = [], [], [], [0]
        for text in texts:
            rows = len(text.tokens) - 1
            tokens = torch.nn.functional.pad(text.tokens.long(), (0, depth), value=-1)
            after.append(tokens.unfold(0, depth + 1, 1)[1 : rows + 1])
            position.append(torch.arange(rows))
            chained.append((position[-1] >= text.prompt - 1) & (position[-1] < rows - 1))
            first.append(first[-1] + rows)
        hidden = torch.cat([text.residual for text in texts]).float()
        return cls(texts, hidden, torch.cat(position), torch.cat(after), torch.cat(chained), tuple(first))


@dataclass(frozen=True, slots=True)
class Guess:
    """One step of the chains that go on: `row` int64[chains] where each began, `depth` 1 for the first guess,
    `token` int64[chains] the right one, `given` float32[chains, hidden] what the layer gave."""

    depth: int
    row: torch.Tensor
    token: torch.Tensor
    given: torch.Tensor


class Target:
    """What of the target model the head reads, and what it is to guess."""

    def __init__(self, source: WeightSource, head: DraftHead) -> None:
        config = head.config
        self.embedding = source.tensor(EMBEDDING)
        projection = self.embedding if config.tie_embeddings else source.tensor(f"{head_name(config)}.weight")
        self.kept_rows = projection[head.kept].contiguous()
        self.rotary = rotary_table(config, LENGTH_MAX)
        self._norm, self._eps = source.tensor(FINAL_NORM), config.norm_eps

    def normalized(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target's own output projection reads."""
        return rms_norm(hidden, self._norm, self._eps)


def unroll(
    head: DraftHead, target: Target, batch: Batch, depth: int, go_on: torch.Tensor | None = None
) -> Iterator[Guess]:
    """Guesses of depth 1 to `depth`. Only chains that begin at `go_on` bool[rows] get beyond the first."""
    x = head.enter(target.embedding[batch.after[:, 0]], batch.hidden)
    q, keys, values = head.project(x, target.rotary[batch.position])
    row = batch.chained.nonzero()[:, 0]
    q, x, given = q[row], x[row], batch.hidden[row]
    chain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(1, depth + 1):
        if step > 1:
            stays = batch.after[row, step] >= 0
            if step == 2 and go_on is not None:
                stays &= go_on[row]
            row, given = row[stays], given[stays]
            x = head.enter(target.embedding[batch.after[row, step - 1]], given)
            q, k, v = head.project(x, target.rotary[batch.position[row] + step - 1])
            chain = [(old_k[stays], old_v[stays]) for old_k, old_v in chain] + [(k, v)]
        given = head.leave(x, _attend(batch, row, q, keys, values, chain))
        yield Guess(step, row, batch.after[row, step], given)


def _attend(
    batch: Batch,
    row: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chain: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Each chain sees the positions of its text up to where it began, as the target's residuals made them, and its own
    later ones; float32[chains, heads * head_dim]."""
    heads, width = q.shape[1:]
    kv_heads = keys.shape[1]
    q = q.view(len(q), kv_heads, heads // kv_heads, width) * width**-0.5
    own = [torch.einsum("rkgd,rkd->kgr", q, k) for k, _ in chain]
    bounds = torch.searchsorted(row, torch.tensor(batch.first)).tolist()
    parts = []
    for begin, end, first in zip(bounds, bounds[1:], batch.first, strict=False):
        if begin == end:
            continue
        last = int(row[end - 1]) + 1
        k, v = (tensor[first:last].transpose(0, 1) for tensor in (keys, values))
        packed = q[begin:end].permute(1, 2, 0, 3).reshape(kv_heads, -1, width)
        scores = (packed @ k.transpose(1, 2)).view(kv_heads, -1, end - begin, last - first)
        unseen = torch.arange(first, last) > row[begin:end, None]
        scores = scores.masked_fill(unseen, float("-inf"))
        scores = torch.cat([scores, *(score[:, :, begin:end, None] for score in own)], dim=-1)
        weights = scores.softmax(-1)
        mixed = weights[..., : last - first].reshape(kv_heads, -1, last - first) @ v
        mixed = mixed.view(kv_heads, -1, end - begin, width)
        for index, (_, own_v) in enumerate(chain):
            here = own_v[begin:end].transpose(0, 1)[:, None]
            mixed = mixed + weights[..., last - first + index, None] * here
        parts.append(mixed.permute(2, 0, 1, 3).reshape(end - begin, heads * width))
    return torch.cat(parts)
