"""What a lane earns beside its tokens: the device time that it is charged with, and the wait for a first output.

Owns time prices and the value of a first output (docs/scheduling.md, "Time prices" and "First outputs"). Does not own
the lanes that earn them (`streams`, `prompt`). Surprising rule: none of it depends on the graph that would serve the
lane. The time is that of the best measured rate, so that a lane is worth as much in a slow graph as in a fast one, and
the division by T is what tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .compiled import Compiled, Shapes
from .interval import row_ms
from .lanes import Floats, Scaled
from .view import RequestRow


def round_premium(compiled: Compiled, duration_ms: Floats, scaled: Scaled, ready: int, blocked: int) -> Floats | None:
    """What a round earns each stream besides [m], the `ready` ones first; None if nothing.

    A ready stream belongs to a family of the ready ones, a blocked one to that of all, as in the delivery at the end of
    its reference interval. `duration_ms` [G] is that of all graphs of the catalog, 0 where unknown.
    """
    if scaled.output_time_price == 0.0:
        return None
    rounds = compiled.rounds
    times = duration_ms[rounds.index]
    premium = np.empty(ready + blocked)
    premium[:ready] = row_ms(times, rounds.batch, ready) or 0.0
    if blocked:
        premium[ready:] = row_ms(times, rounds.batch, ready + blocked) or 0.0
    return premium * scaled.output_time_price


def prompt_premium(group: Shapes, times: Floats, scaled: Scaled, rows: Sequence[RequestRow]) -> Floats | None:
    """What each prompt token earns a row besides [m]; None if nothing.

    `times` [g] are the durations of the graphs in `group`, which serve the rows, 0 where unknown; with none measured,
    time has no price.
    """
    timed = scaled.prompt_time_price > 0.0 or scaled.first_output_urgency > 0.0
    if not timed and scaled.first_output_value == 0.0:
        return None
    age_ms = np.array([row.age_ms for row in rows], np.float64)
    premium = np.zeros(len(rows))
    known = times > 0.0
    if timed and known.any():
        token_ms = float((times[known] / group.prefill_tokens[known]).min())
        premium += token_ms * (scaled.prompt_time_price + scaled.first_output_urgency * _urgency(age_ms, scaled))
    if scaled.first_output_value > 0.0:
        left = np.array([row.prompt_tokens - row.position for row in rows], np.float64)
        value = np.full(len(rows), scaled.first_output_value)
        if scaled.first_output_growth_ms > 0.0:
            value *= 1.0 + age_ms / scaled.first_output_growth_ms
        premium += value / left
    return premium


def _urgency(age_ms: Floats, scaled: Scaled) -> Floats:
    """How urgent a first output is at its age [m]: 0 at first, 1 at the patience, and less again when that is over."""
    share = age_ms / scaled.first_output_patience_ms
    near = 2.0 * share / (1.0 + share * share)
    square = near * near
    return square * square
