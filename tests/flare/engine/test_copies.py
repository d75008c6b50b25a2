"""Proposals copied from a request's own tokens, against a search through the whole text."""

from __future__ import annotations

import random

import pytest

from flare.engine.copies import GRAMS, Copies


def searched(tokens: list[int], most: int) -> list[int]:
    """What followed the longest n-gram at the end where it last stood, found the slow way."""
    for length in GRAMS:
        if len(tokens) < length:
            continue
        tail = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tail:
                span = tokens[end : end + most]
                while len(span) < most:
                    span += span[: most - len(span)]
                return span
    return []


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_recent_match_is_proposed(seed: int) -> None:
    random_ = random.Random(seed)
    alphabet = random_.choice((2, 3, 8, 40))
    tokens = [random_.randrange(alphabet) for _ in range(random_.randrange(40))]
    copies = Copies(tokens)
    for _ in range(60):
        most = random_.randrange(1, 9)
        assert copies.propose(most) == searched(tokens, most)
        more = [random_.randrange(alphabet) for _ in range(random_.randrange(1, 5))]
        copies.extend(more)
        tokens += more


def test_what_repeats_is_proposed_beyond_the_end_of_the_text() -> None:
    copies = Copies([7, 8, 9] * 2)
    assert copies.propose(7) == [7, 8, 9, 7, 8, 9, 7]


def test_new_text_proposes_nothing() -> None:
    assert Copies(range(50)).propose(4) == []
    assert Copies([]).propose(4) == []
