"""Proposals copied from a request's own tokens.

Owns the index of n-grams of prompt and output, and the span that followed the last tokens when they stood there before
(prompt lookup; Saxena, 2023). Does not own what is accepted. Surprising rule: a span that runs into the end of the text
goes on with itself, so that what repeats in short periods is proposed in full.
"""

from __future__ import annotations

from collections.abc import Sequence

GRAMS = (5, 4, 3)
"""Lengths of n-grams that are looked up, longest first: shorter ones stand by chance in any text."""


class Copies:
    """The tokens of one request. Work is constant for each token."""

    __slots__ = ("_ends", "_tokens")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that follow."""
        known, ends = self._tokens, self._ends
        for token in tokens:
            # What ends here is indexed when the next token comes, so that the last tokens never find themselves.
            end = len(known)
            for length in GRAMS:
                if end >= length:
                    ends[tuple(known[end - length :])] = end
            known.append(token)

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest n-gram of the last tokens where it last stood; none, if it is
        new."""
        known = self._tokens
        for length in GRAMS:
            start = self._ends.get(tuple(known[-length:])) if len(known) >= length else None
            if start is not None:
                span = known[start : start + most]
                while len(span) < most:
                    span += span[: most - len(span)]
                return span
        return []
