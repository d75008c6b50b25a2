"""The arithmetic of a prerequisite and the graph that follows it.

Owns the value of the best split for given durations and capacities (docs/scheduling.md, "Stages and prerequisites").
Does not own which pairs exist (`pairs`). Surprising rule: no subset is enumerated. For fixed durations lane values add
up, so that for every number k of newly ready lanes the best k of them, the best ready ones and the best terminal ones
are prefixes of three sorted lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .cohort import Ranking


class Lines(NamedTuple):
    """Sums over the best k = 0, 1, ... lanes of a group, best first: they are worth `base[k] + slope[k] * H`."""

    base: list[float]
    slope: list[float]

    @staticmethod
    def of(ranking: Ranking, offer_at: int = 0) -> Lines:
        """The lines of a ranking at one offer."""
        base = ranking.service[offer_at] + ranking.aged[offer_at]
        return Lines(base.tolist(), ranking.urgency[offer_at].tolist())

    @property
    def most(self) -> int:
        """How many lanes there are."""
        return len(self.base) - 1


class Split(NamedTuple):
    """How many newly ready and ready lanes the following graph serves, and how many rows the first one retires."""

    newly: int
    ready: int
    retired: int
    value: float


def splits(
    newly: Lines,
    ready: Lines,
    terminals: Lines,
    *,
    least: int,
    first_rooms: int,
    following_rooms: int,
    first_ms: float,
    horizon_ms: float,
    terminal_age_price: float,
) -> Iterator[Split]:
    """The best split for every number of newly ready lanes from `least` on, for a first graph of `first_rooms` and
    `first_ms` and a sequence of `horizon_ms`.

    A lane of the following graph is worth its service and the end of its wait at H. The wait of a retired row ends with
    the first graph, which saves its price over the rest: c * (H^2 - T^2)/2.
    """
    saved = (horizon_ms * horizon_ms - first_ms * first_ms) * (0.5 * terminal_age_price)
    for count in range(least, min(newly.most, first_rooms, following_rooms) + 1):
        beside, retired = min(following_rooms - count, ready.most), min(first_rooms - count, terminals.most)
        value = newly.base[count] + ready.base[beside] + (newly.slope[count] + ready.slope[beside]) * horizon_ms
        value += terminals.base[retired] + terminals.slope[retired] * first_ms + retired * saved
        yield Split(count, beside, retired, value)


def sequence_score(value: float, horizon_ms: float, waiting_price: float, gap_cost: float) -> float:
    """Value per ms of a sequence less the waiting and the gaps that it imposes; `value` itself if the horizon is not
    known (0)."""
    return value / horizon_ms - horizon_ms * (0.5 * waiting_price) - gap_cost if horizon_ms else value
