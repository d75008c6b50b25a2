"""The stale graph that is measured again in place of the ordinary winner.

Owns docs/scheduling.md, "Timing refresh", as far as one decision goes. Does not own the ledger that pays for it.
Surprising rule: the stale graph that has been out of use for longest comes first, whatever it is worth; value decides
only which of its cohorts runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocked import Blocked
from .lanes import Option
from .order import Pool, Standing, champion, standing
from .pairs import pair_pool
from .view import GraphRow, View


def refresh(
    view: View, pools: Sequence[Pool], blocked: Blocked | None, winner: GraphRow
) -> tuple[Standing, Option] | None:
    """What displaces a measured `winner`: the stale candidate whose graph was observed or attempted the longest ago.

    `pools` has the candidates of single graphs; pairs are worked out here, for stale prerequisites alone. None if no
    other stale graph has a candidate.
    """
    stale: dict[int, list[int]] = {}
    for place, graph in enumerate(view.graphs):
        if graph.stale and graph.duration_ns > 0 and graph.shape != winner.shape:
            stale.setdefault(max(graph.observed_at_ns, graph.attempted_at_ns), []).append(place)
    for used_ns in sorted(stale):
        places = [_best(pools, blocked, place) for place in stale[used_ns]]
        found = [one for one in places if one is not None]
        if found:
            return min(found, key=lambda one: one[0])
    return None


def _best(pools: Sequence[Pool], blocked: Blocked | None, place: int) -> tuple[Standing, Option] | None:
    """The best candidate whose dispatched graph is at `place` in the view's graphs."""
    pairs = None if blocked is None else pair_pool(blocked, only=place)
    found = []
    for pool in pools if pairs is None else (*pools, pairs):
        index = champion(pool, pool.dispatched == place)
        if index is not None:
            option = pool.option(index)
            found.append((standing(pool.terms, index, option), option))
    return min(found, key=lambda one: one[0], default=None)
