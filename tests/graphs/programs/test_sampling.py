"""The definition of sampling, in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare.graphs.frames import Binding, Sampling
from flare.graphs.programs.buffers import StepBuffers
from flare.graphs.programs.extents import Extents
from flare.graphs.programs.noise import draw_key, gumbel
from flare.graphs.programs.rows import LOGIT_BIAS_MAX, StateRows, check_binding
from flare.graphs.programs.sampling import sample, score
from flare.machines.ids import PageId

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.5, -3.0])


def draw(
    sampling: Sampling, position: int = 9, history: dict[int, int] | None = None, banned: tuple[int, ...] = ()
) -> int:
    """One token drawn from LOGITS."""
    rows, buffers = StateRows.allocate(2, 64), StepBuffers.allocate(Extents(1, 1, 1), 64)
    rows.bind(1, 0, Binding((PageId(0),), sampling, (), 5))
    rows.committed[1] = position
    buffers.slot[0] = 1
    for index, (token, count) in enumerate((history or {}).items()):
        buffers.history_tokens[0, index], buffers.history_counts[0, index] = token, count
    buffers.seen[0] = len(history or {})
    buffers.banned[0, : len(banned)] = torch.tensor(banned, dtype=torch.int32)
    buffers.banned_count[0], buffers.banned_rows[0] = len(banned), 1
    return sample(LOGITS, rows, buffers, 0)


def frequencies(**settings: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How often each token is drawn over 1,500 positions."""
    drawn = [draw(Sampling(seed=3, **settings), position) for position in range(1500)]  # type: ignore[arg-type]
    return np.bincount(drawn, minlength=len(LOGITS)) / len(drawn)


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    tokens = torch.arange(1000)
    noise = gumbel(draw_key(5, 17), tokens)
    assert torch.equal(noise[300:400], gumbel(draw_key(5, 17), tokens[300:400]))
    assert not torch.equal(noise, gumbel(draw_key(5, 18), tokens))
    assert not torch.equal(noise, gumbel(draw_key(6, 17), tokens))


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(draw_key(2**63 - 1, 3), torch.arange(200_000)).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert float((noise > 3.0).double().mean()) == pytest.approx(1 - np.exp(-np.exp(-3.0)), abs=0.003)


def test_draws_follow_softmax() -> None:
    assert np.abs(frequencies() - LOGITS.softmax(-1).numpy()).max() < 0.04
    assert np.abs(frequencies(temperature=0.5) - (LOGITS / 0.5).softmax(-1).numpy()).max() < 0.04


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"top_k": 2}, {0, 4}), ({"top_p": 0.5}, {0, 4}), ({"top_p": 0.01}, {0}), ({"min_p": 0.3}, {0, 1, 4})],
)
def test_cuts_keep_the_likely_tokens(settings: dict[str, float], kept: set[int]) -> None:
    shares = frequencies(**settings)
    assert {token for token, share in enumerate(shares) if share > 0} == kept
    expected = LOGITS[sorted(kept)].softmax(-1).numpy()
    assert np.abs(shares[sorted(kept)] - expected).max() < 0.04


def test_adjustments_move_the_greedy_choice() -> None:
    greedy = 0.0
    assert draw(Sampling(temperature=greedy)) == 0
    assert draw(Sampling(temperature=greedy, logit_bias=((0, -100.0),))) == 4
    assert draw(Sampling(temperature=greedy, logit_bias=((5, 100.0),))) == 5
    assert draw(Sampling(temperature=greedy), banned=(0, 4)) == 1
    assert draw(Sampling(temperature=greedy, presence_penalty=0.6), history={0: 1}) == 4
    assert draw(Sampling(temperature=greedy, presence_penalty=0.6), history={0: 0}) == 0
    assert draw(Sampling(temperature=greedy, frequency_penalty=0.3), history={0: 1}) == 0
    assert draw(Sampling(temperature=greedy, frequency_penalty=0.3), history={0: 2}) == 4
    assert draw(Sampling(temperature=greedy, repetition_penalty=2.0), history={0: 0}) == 4


def test_scores_are_of_raw_logits() -> None:
    scores = score(LOGITS, 3, 2)
    assert scores.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[3]))
    assert scores.top_tokens.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("binding", "named"),
    [
        (Binding((PageId(4),), Sampling(), (), 1), "pages"),
        (Binding((PageId(0),) * 9, Sampling(), (), 1), "pages"),
        (Binding((PageId(0),), Sampling(), tuple(range(129)), 1), "stop_tokens"),
        (Binding((PageId(0),), Sampling(logit_bias=((0, 1.0),) * (LOGIT_BIAS_MAX + 1)), (), 1), "logit_bias"),
        (Binding((PageId(0),), Sampling(logit_bias=((6, 1.0),)), (), 1), "logit_bias"),
        (Binding((PageId(0),), Sampling(seed=2**63), (), 1), "seed"),
        (Binding((PageId(0),), Sampling(top_k=-1), (), 1), "top_k"),
        (Binding((PageId(0),), Sampling(), (), 1, logprobs=21), "logprobs"),
    ],
)
def test_a_binding_that_no_row_can_hold_is_refused_by_name(binding: Binding, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_binding(binding, pages=4, table_pages=8, vocab=6)
