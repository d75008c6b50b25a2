"""How the tokens of rounds are distributed: as the target alone would draw them.

Owns the checks by chi-square, of every rule and source, to be subclassed with `make`. Does not own rounds (`rounds`).
Surprising rule: what a token should be drawn from is taken from the alternatives that its own row reports; as `top_k`
is below their number, they are all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flare.graphs.frames import LaneResult, Sampling
from flare.graphs.models.draft import DraftModel, whole_model
from flare.machines.graph import GraphKind, GraphShape, Source
from tests.graphs.exact_rounds import CONFIG, SOURCE, ids
from tests.graphs.programs_driver import Driver, Make, Tensors
from tests.graphs.rounds import Row, proposals

SLOTS, WIDTH, TARGETS = 16, 4, 24
SAMPLING = Sampling(temperature=1.2, top_k=5, top_p=0.97, min_p=0.03)
LIKELY = 0.001
Prefix = tuple[int, ...]


@cache
def near() -> DraftModel:
    """The model with a little noise on its weights: right as often as a good draft is, and often unlike the target."""
    random = torch.Generator().manual_seed(1)
    noisy = {
        name: tensor * (1 + 0.2 * torch.randn(tensor.shape, generator=random))
        for name, tensor in SOURCE.tensors.items()
    }
    return whole_model("near", CONFIG, Tensors(noisy), CONFIG)


def cuts(logprobs: Sequence[float]) -> NDArray[np.float64]:
    """What is drawn from: the probability of each of a row's alternatives, best first, exactly."""
    z = np.array(logprobs, np.float64) / SAMPLING.temperature
    p = np.exp(z - z[0])
    p[p < SAMPLING.min_p] = 0.0
    p[SAMPLING.top_k :] = 0.0
    p /= p.sum()
    p[np.cumsum(p) - p >= SAMPLING.top_p] = 0.0
    whole: NDArray[np.float64] = p / p.sum()
    return whole


class Rounds:
    """First rounds of one prompt, over and over, each with seeds of its own."""

    def __init__(self, driver: Driver, source: Source, *, allocates: bool) -> None:
        self.driver = driver
        self._rows = [Row(ids(11, 7), SAMPLING, limit=40, logprobs=SAMPLING.top_k) for _ in range(SLOTS)]
        for slot, row in enumerate(self._rows):
            row.begin(driver, slot)
        state = driver.program.rows
        self._state = {field.name: getattr(state, field.name).clone() for field in fields(state)}
        self._random = np.random.default_rng(3)
        (following,) = driver.decode([self._rows[0].handle])[0].scores or ()
        self._copies = [token for token, _ in following.top[:2]]
        self._copied = source is Source.COPY
        self._allocates = allocates
        targets = TARGETS if allocates else SLOTS * WIDTH
        self._shape = GraphShape(GraphKind.SPECULATIVE, SLOTS, 0, 0, WIDTH, WIDTH - 1, targets, True, source)

    def __iter__(self) -> Iterator[tuple[LaneResult, ...]]:
        """Endless."""
        rows = self.driver.program.rows
        while True:
            for name, value in self._state.items():
                getattr(rows, name).copy_(value)
            rows.seed[:] = torch.from_numpy(self._random.integers(0, 2**62, SLOTS))
            copies = (lambda _, count: self._random.choice(self._copies, count)) if self._copied else None
            lanes = [row.lane(WIDTH, copies) for row in self._rows]
            yield self.driver.run(self._shape, lanes, allocates=self._allocates)


def chance(rounds: Rounds, count: int) -> tuple[float, float]:
    """How likely what `count` tokens show is, if each is drawn as it should be; and tokens per round."""
    drawn: dict[Prefix, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    expected: dict[Prefix, dict[int, float]] = {}
    total = served = 0
    for results in rounds:
        for result in results:
            for at, (token, score) in enumerate(zip(result.tokens, result.scores or (), strict=True)):
                prefix = result.tokens[:at]
                drawn[prefix][token] += 1
                tokens, logprobs = zip(*score.top, strict=True)
                expected[prefix] = dict(zip(tokens, cuts(logprobs), strict=True))
            total += len(result.tokens)
        served += SLOTS
        if total >= count:
            break
    statistic, freedom = 0.0, 0
    for prefix, counts in drawn.items():
        number, cells = sum(counts.values()), []
        assert all(expected[prefix].get(token, 0.0) > 0 for token in counts), "a token that the cuts exclude"
        rare = [0.0, 0.0]
        for token, p in expected[prefix].items():
            if number * p >= 8:
                cells.append([counts[token], number * p])
            else:
                rare = [rare[0] + counts[token], rare[1] + number * p]
        cells += [rare] if rare[1] >= 8 else []
        if len(cells) < 2:
            continue
        shown, due = np.array(cells).T
        due *= shown.sum() / due.sum()
        statistic += float(((shown - due) ** 2 / due).sum())
        freedom += len(cells) - 1
    likely = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))
    return float(likely), total / served


class RoundDistribution:
    """Subclass with `make` and how many `tokens` are drawn."""

    make: Make
    tokens: int

    def rounds(self, source: Source, *, rejects: bool, allocates: bool = False) -> Rounds:
        """Of this program."""
        driver = Driver(self.make, CONFIG, SOURCE, slots=SLOTS, draft=near(), width=WIDTH, rejects=rejects)
        return Rounds(driver, source, allocates=allocates)

    @pytest.mark.parametrize("rejects", [False, True], ids=["match", "rejection"])
    @pytest.mark.parametrize("source", [Source.DRAFT, Source.COPY, None], ids=["drafted", "copied", "shared out"])
    def test_tokens_are_drawn_as_the_target_alone_draws_them(self, source: Source | None, rejects: bool) -> None:
        rounds = self.rounds(source or Source.DRAFT, rejects=rejects, allocates=source is None)
        likely, each = chance(rounds, self.tokens)
        print(f"p = {likely:.4f} with {each:.2f} tokens a round")
        assert likely > LIKELY
        assert each > 1.1

    @pytest.mark.parametrize("source", Source)
    def test_survival_is_the_product_of_ratios(self, source: Source) -> None:
        rounds = self.rounds(source, rejects=True)
        buffers = rounds.driver.program.buffers
        for results, _ in zip(rounds, range(8), strict=False):
            made = proposals(rounds.driver, [WIDTH] * SLOTS)
            for lane, result in enumerate(results):
                ratios = []
                for at, token in enumerate(made[lane]):
                    top = buffers.top_tokens[lane, at, : SAMPLING.top_k].tolist()
                    p = dict(zip(top, cuts(buffers.top_logprobs[lane, at, : SAMPLING.top_k].tolist()), strict=True))
                    q = float(buffers.draft_probabilities[lane, at, token]) if source is Source.DRAFT else 1.0
                    ratios.append(min(1.0, p.get(token, 0.0) / q))
                assert result.survival == pytest.approx(np.cumprod(ratios), abs=1e-4)
                accepted = len(result.tokens) - 1
                assert list(result.tokens[:accepted]) == made[lane][:accepted]
