"""The stale graph that is measured again in place of the ordinary winner.

Owns docs/scheduling.md, "Timing refresh", as far as one decision goes. Does not own the ledger that pays for it.
Surprising rule: the stale graph that has been out of use for longest comes first, whatever it is worth; value decides
only which of its cohorts runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocked import Blocked
from .order import Leader, Pool, front, leader
from .pairs import pair_pool
from .view import GraphRow, View


def refresh(view: View, pools: Sequence[Pool], blocked: Blocked | None, winner: GraphRow) -> Leader | None:
    """What displaces a measured `winner`: the stale candidate whose graph was observed or attempted the longest ago.

    `pools` has the candidates of single graphs; pairs are worked out here, for stale prerequisites alone. None if no
    other stale graph has a candidate.
    """
    stale: dict[int, list[int]] = {}
    for place, graph in enumerate(view.graphs):
        if graph.stale and graph.duration_ns > 0 and graph.shape != winner.shape:
            stale.setdefault(max(graph.observed_at_ns, graph.attempted_at_ns), []).append(place)
    for used_ns in sorted(stale):
        leaders = [_first(pools, blocked, place) for place in stale[used_ns]]
        found = [one for one in leaders if one is not None]
        if found:
            return min(found, key=lambda one: one.place)
    return None


def _first(pools: Sequence[Pool], blocked: Blocked | None, place: int) -> Leader | None:
    """The best candidate whose dispatched graph is at `place` in the view's graphs."""
    pairs = None if blocked is None else pair_pool(blocked, only=place)
    return leader(front(pools if pairs is None else (*pools, pairs), dispatched=place))
