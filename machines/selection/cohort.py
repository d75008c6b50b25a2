"""The best cohort of a graph whose rows do not constrain one another.

Owns the order of lanes and the sums of the best k of them (docs/scheduling.md, "Score"). Does not own what a lane is
worth. Surprising rule: no subset is enumerated, and nothing is sorted again for another duration. Neither the duration
nor the waiting cost of a graph depends on who is served, so its best cohort is its lanes of highest value; and where
all lanes have the same urgency, a longer horizon raises them all alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .lanes import Floats


class Ranking(NamedTuple):
    """Lanes best first, [w, m] places, and what the best k = 0..m of them sum to, [w, m + 1].

    The best k lanes are worth `service[k] + aged[k] + urgency[k] * horizon`.
    """

    order: NDArray[np.intp]
    service: Floats
    aged: Floats
    urgency: Floats


def rank(service: Floats, urgency: Floats, age_ms: Floats, horizon_ms: float = 0.0) -> Ranking:
    """Order lanes by `service + urgency * (age + horizon)`; equals keep their order.

    `service` [w, m] is the priced service of each lane at each offer, `urgency` [m] is c * sigma, `age_ms` [m] the wait
    at the start. Where all urgencies are equal, the order is that of every horizon.
    """
    aged = urgency * age_ms
    worth = service + (aged + urgency * horizon_ms if horizon_ms else aged)
    order = (-worth).argsort(axis=1, kind="stable")
    offers, lanes = service.shape
    sums = np.zeros((3, offers, lanes + 1))
    sums[0, :, 1:] = service.take(order + np.arange(offers)[:, None] * lanes)
    sums[1, :, 1:] = aged.take(order)
    sums[2, :, 1:] = urgency.take(order)
    # Cumulative sums add from the first lane on, the same on every machine.
    return Ranking(order, *sums.cumsum(axis=2))
