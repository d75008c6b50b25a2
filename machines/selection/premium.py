"""What a lane earns beside its tokens: the device time that it is charged with, and the wait for a first output.

Owns time prices and the value of a first output (docs/scheduling.md, "Time prices" and "First outputs"). Does not own
the lanes that earn them (`streams`, `prompt`). Surprising rule: none of it depends on the graph that would serve the
lane. The time is that of the best measured rate, so that a lane is worth as much in a slow graph as in a fast one, and
the division by T is what tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .interval import row_ms
from .lanes import Floats, Ints, Scaled
from .times import Group
from .view import RequestRow


def round_premium(rounds: Group, scaled: Scaled, ready: int, blocked: int) -> Floats:
    """What a round earns each stream besides [m], the `ready` ones first.

    A ready stream belongs to a family of the ready ones, a blocked one to that of all, as in the delivery at the end of
    its reference interval.
    """
    premium = np.empty(ready + blocked)
    premium[:ready] = row_ms(rounds.ms, rounds.shapes.batch, ready) or 0.0
    if blocked:
        premium[ready:] = row_ms(rounds.ms, rounds.shapes.batch, ready + blocked) or 0.0
    return premium * scaled.output_time_price


def prompt_premium(
    capacities: Ints, group: Group, scaled: Scaled, rows: Sequence[RequestRow], age_ms: Floats
) -> Floats | None:
    """What each prompt token earns a row besides [m]; None if nothing.

    `group` serves the rows; with none of it measured, time has no price. `age_ms` [m] is the wait of each row.
    """
    premium: Floats | None = None
    if scaled.prompt_time_price > 0.0 or scaled.first_output_urgency > 0.0:
        token_ms = float((group.least_ms[:-1] / capacities[:-1]).min(initial=np.inf))
        if token_ms < np.inf:
            premium = token_ms * (scaled.prompt_time_price + scaled.first_output_urgency * _urgency(age_ms, scaled))
    if scaled.first_output_value > 0.0:
        left = np.array([row.prompt_tokens - row.position for row in rows])
        growing = scaled.first_output_growth_ms > 0.0
        growth = 1.0 + age_ms / scaled.first_output_growth_ms if growing else 1.0
        value = scaled.first_output_value * growth / left
        premium = value if premium is None else premium + value
    return premium


def _urgency(age_ms: Floats, scaled: Scaled) -> Floats:
    """How urgent a first output is at its age [m]: 0 at first, 1 at the patience, and less again when that is over."""
    share = age_ms / scaled.first_output_patience_ms
    near = 2.0 * share / (1.0 + share * share)
    square = near * near
    return square * square
