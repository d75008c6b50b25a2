"""How many guesses of a head a target accepts, counted on texts that it wrote itself.

Owns the counts. Does not own texts or the head. Surprising rule: at a temperature the head draws with the very noise
that the target drew with, so that a guess is right exactly when both draws fall on the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from flare.graphs.programs.noise import draw_key, gumbel

from .head import DraftHead
from .texts import Text
from .unroll import Batch, Target, unroll

TEXTS_AT_ONCE = 8


class Acceptance(msgspec.Struct, frozen=True):
    """`rates`: of each depth the share of guesses accepted where all before were. `mean`: accepted guesses from a
    position, averaged over positions. `rounds`: likewise over rounds only, each of which begins where the one before
    ended. Both with as many guesses as `mean_depth`."""

    rates: tuple[float, ...]
    mean: float
    rounds: float
    mean_depth: int


@torch.inference_mode()
def acceptance(
    head: DraftHead, target: Target, texts: Sequence[Text], depth: int = 4, mean_depth: int = 3
) -> Acceptance:
    """Judge a head; the texts must all have the same temperature."""
    tried, right = [0] * depth, [0] * depth
    means: list[int] = []
    rounds: list[int] = []
    for begin in range(0, len(texts), TEXTS_AT_ONCE):
        batch = Batch.of(texts[begin : begin + TEXTS_AT_ONCE], depth)
        accepted = torch.zeros(len(batch.hidden), dtype=torch.int64)
        noise = _noise(head, batch)
        for guess in unroll(head, target, batch, depth):
            logits = head.normalized(guess.given) @ target.kept_rows.T
            if noise is not None:
                logits = logits / texts[0].temperature + noise[guess.row + guess.depth]
            alive = accepted[guess.row] == guess.depth - 1
            hit = alive & (head.kept[logits.argmax(-1)] == guess.token)
            accepted[guess.row] += hit
            tried[guess.depth - 1] += int(alive.sum())
            right[guess.depth - 1] += int(hit.sum())
        counts = accepted.clamp(max=mean_depth)
        means += counts[batch.chained].tolist()
        for first, end in zip(batch.first, batch.first[1:], strict=False):
            rounds += rounds_of(counts[first:end][batch.chained[first:end]].tolist())
    rates = tuple(r / max(t, 1) for r, t in zip(right, tried, strict=True))
    return Acceptance(rates, sum(means) / max(len(means), 1), sum(rounds) / max(len(rounds), 1), mean_depth)


def rounds_of(counts: Sequence[int]) -> Iterator[int]:
    """Of the guesses accepted from each position of a text, those of the rounds that it would take."""
    place = 0
    while place < len(counts):
        yield counts[place]
        place += counts[place] + 1


def _noise(head: DraftHead, batch: Batch) -> torch.Tensor | None:
    """Of each row the noise with which the token after it was drawn; None if texts are greedy."""
    if batch.texts[0].temperature == 0:
        return None
    places = zip(batch.first, batch.texts, strict=False)
    return torch.stack(
        [
            gumbel(draw_key(text.seed, position + 1), head.kept)
            if position + 1 >= text.prompt
            else torch.zeros(len(head.kept))
            for _, text in places
            for position in range(len(text.tokens) - 1)
        ]
    )
