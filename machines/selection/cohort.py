"""The best cohort of a graph whose rows do not constrain one another.

Owns the choice of lanes for one frame (docs/scheduling.md, "Score"). Does not own what a lane is worth. Surprising
rule: no subset is enumerated. Neither the duration nor the waiting cost of a graph depends on who is served, so its
best cohort is its lanes of highest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .lanes import Floats, Ints


@dataclass(frozen=True, slots=True)
class Lanes:
    """What serving each request [m] is worth: its priced service, and c * sigma per ms of the wait that it ends."""

    service: Floats
    urgency: Floats
    age_ms: Floats


@dataclass(frozen=True, slots=True)
class Cohorts:
    """For each graph [g]: all lanes [g, m] best first, how many are served, and what those sum to."""

    order: NDArray[np.intp]
    served: Ints
    service: Floats
    age: Floats


def best_cohorts(lanes: Lanes, duration_ms: Floats, capacity: Ints) -> Cohorts:
    """Fill every graph with its best lanes; equals keep their order. At least one lane, capacities of at least 1.

    A lane that waits `age_ms` at the start ends a wait of age + T. An unknown graph (`duration_ms` 0) ranks by service.
    """
    known = duration_ms[:, None] > 0.0
    age = np.where(known, lanes.urgency * (lanes.age_ms + duration_ms[:, None]), 0.0)
    order = np.argsort(-(lanes.service + age), axis=1, kind="stable")
    served: Ints = np.minimum(capacity, len(lanes.service))
    last = np.arange(len(order)), served - 1
    # Cumulative sums add from the first lane on, the same on every machine.
    return Cohorts(
        order,
        served,
        np.cumsum(lanes.service[order], axis=1)[last],
        np.cumsum(np.take_along_axis(age, order, axis=1), axis=1)[last],
    )
