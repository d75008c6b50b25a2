"""Synthetic tokens: pure, chunk-wise hashable, and obedient to stops, bans and biases."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flare.graphs.frames import Binding, Sampling
from flare.graphs.sim.tokens import DrawRules, TokenSource, hash_tokens, mix

PROMPTS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


def rules(sampling: Sampling, stop_tokens: tuple[int, ...] = ()) -> DrawRules:
    """The rules of a binding."""
    return TokenSource().rules(Binding((), sampling, stop_tokens, 10))


@given(PROMPTS, st.data())
def test_the_hash_of_a_prompt_is_the_sum_of_its_chunks(prompt: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(prompt)))
    tokens = np.array(prompt, dtype=np.int32)
    whole = hash_tokens(tokens, 0)
    assert whole == (hash_tokens(tokens[:cut], 0) + hash_tokens(tokens[cut:], cut)) % 2**64


@given(PROMPTS, st.integers(0, 30))
def test_the_hash_agrees_with_the_scalar_mixer(prompt: list[int], start: int) -> None:
    parts = [mix((token + (start + 1 + index) * 0x9E3779B97F4A7C15) % 2**64) for index, token in enumerate(prompt)]
    assert hash_tokens(np.array(prompt, dtype=np.int32), start) == sum(parts) % 2**64


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.integers(0, 20))
def test_a_drawn_token_is_allowed(banned: set[int], stops: set[int], biased: set[int], index: int) -> None:
    sampling = Sampling(logit_bias=tuple((token, -100.0) for token in biased))
    token = TokenSource(range(10)).draw(rules(sampling, tuple(stops)), 123, 5, index, banned)
    allowed = set(range(10)) - banned - stops - biased
    assert token in allowed if allowed else token is None


def test_a_forcing_bias_wins_unless_banned() -> None:
    forced = rules(Sampling(logit_bias=((3, 100.0), (4, 1.0))), (3,))
    source = TokenSource(range(10))
    assert all(source.draw(forced, 9, 5, index, frozenset()) == 3 for index in range(10))
    assert all(source.draw(forced, 9, 5, index, {3}) != 3 for index in range(10))


def test_the_end_comes_where_it_is_said_unless_banned() -> None:
    source = TokenSource(range(10), eos_at=lambda _hash, prompt_tokens, index: prompt_tokens + index == 8)
    stopping = rules(Sampling(), (6, 7))
    drawn = [source.draw(stopping, 1, 5, index, frozenset()) for index in range(6)]
    assert [token in (6, 7) for token in drawn] == [False, False, False, True, False, False]
    assert drawn[3] == 6
    assert source.draw(stopping, 1, 5, 3, {6}) == 7
    assert source.draw(stopping, 1, 5, 3, {6, 7}) not in (6, 7)
    assert source.draw(rules(Sampling()), 1, 5, 3, frozenset()) is not None


def test_tokens_spread_over_the_alphabet() -> None:
    source = TokenSource(range(100, 116))
    drawn = {source.draw(rules(Sampling(seed=5)), 77, 10, index, frozenset()) for index in range(200)}
    assert drawn == set(range(100, 116))


def test_scores_name_distinct_alternatives_best_first() -> None:
    score = TokenSource(range(5)).score(3, 12, 3)
    assert score.top[0] == (3, score.logprob)
    assert [token for token, _ in score.top] == [3, 0, 1]
    assert sorted((logprob for _, logprob in score.top), reverse=True) == [logprob for _, logprob in score.top]
    assert TokenSource(range(5)).score(3, 12, 0).top == ()
