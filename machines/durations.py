"""How long each prepared graph takes, as measured on the device.

Owns the estimate of every graph: first sample, median of the last nine, staleness, last observation and last attempt
(docs/scheduling.md, "Discovery, staleness, exploration"). Does not own what is measured or when. Surprising rule: age
alone never makes a measured graph unknown; a stale estimate keeps ranking until the next sample replaces it outright.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .graph import GraphShape
from .selection.view import GraphRow

WINDOW_SAMPLES = 9


@dataclass(slots=True)
class _Entry:
    row: GraphRow
    samples: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_SAMPLES))


class DurationTable:
    """The estimates of a catalog. Instants and durations in nanoseconds; every call names its `now_ns`."""

    def __init__(self, catalog: Iterable[GraphShape], estimate_ttl_ns: int) -> None:
        if estimate_ttl_ns <= 0:
            raise ValueError(f"estimate_ttl_ns must be positive, not {estimate_ttl_ns}")
        self._ttl_ns = estimate_ttl_ns
        self._entries = {shape: _Entry(GraphRow(shape, 0, 0, 0, False)) for shape in catalog}

    def rows(self, now_ns: int) -> tuple[GraphRow, ...]:
        """Every graph as measured now, in the catalog's order."""
        return tuple([self._refreshed(entry, now_ns) for entry in self._entries.values()])

    def row(self, shape: GraphShape, now_ns: int) -> GraphRow:
        """One graph as measured now. KeyError: not in the catalog."""
        return self._refreshed(self._entries[shape], now_ns)

    def observe(self, shape: GraphShape, sample_ns: int, now_ns: int) -> None:
        """A completed frame measured `sample_ns` of device time; 0 (not measured) changes and freshens nothing."""
        if sample_ns <= 0:
            return
        entry = self._entries[shape]
        if self._refreshed(entry, now_ns).stale:
            entry.samples.clear()
        entry.samples.append(sample_ns)
        entry.row = GraphRow(shape, _median_ns(entry.samples), now_ns, entry.row.attempted_at_ns, False)

    def attempt(self, shape: GraphShape, now_ns: int) -> None:
        """A frame of this graph was committed."""
        row = self._entries[shape].row
        self._entries[shape].row = GraphRow(shape, row.duration_ns, row.observed_at_ns, now_ns, row.stale)

    def _refreshed(self, entry: _Entry, now_ns: int) -> GraphRow:
        """The entry's row with `stale` as of now; made anew only when that changes, since views are taken often."""
        row = entry.row
        stale = row.duration_ns > 0 and now_ns - row.observed_at_ns > self._ttl_ns
        if stale != row.stale:
            entry.row = row = GraphRow(row.shape, row.duration_ns, row.observed_at_ns, row.attempted_at_ns, stale)
        return row


def _median_ns(samples: Iterable[int]) -> int:
    """The median; of an even count the mean of the middle pair, rounded down."""
    ordered = sorted(samples)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2
