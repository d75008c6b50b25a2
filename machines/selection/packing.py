"""Which prompt rows share one graph.

Owns the cohorts of prompt rows: every row alone, and rows packed into one capacity (docs/scheduling.md, "Packed
prompts"). Does not own what a chunk is worth (`prompt`). Surprising rule: packing is a bounded search. Rows are put in
order of value per token of all that each can consume, and only the first q of that order are tried together; the best
packing of all may be another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiled import Ints
from .lanes import Floats
from .prompt import Prompts, chunk
from .view import RequestRow


class PromptCohorts(NamedTuple):
    """Ready prompt rows that one graph may consume together: each alone, then the first q = 2, 3, ... of `order`.

    Over cohorts [c] and capacities [n]: all `tokens`, 0 where the capacity cannot serve the cohort; those of its `last`
    row, which takes what the others leave; the priced `service`; and `aged`, the sum of tokens * age, None where
    no waiting for a first output is priced. `rows` [c] is the number of rows, `stop` [c] the distance of the last one
    to its next endpoint.
    """

    prompts: Prompts
    order: NDArray[np.intp]
    rows: Ints
    tokens: Ints
    last: Ints
    service: Floats
    aged: Floats | None
    stop: Ints

    def members(self, cohort: int, capacity_at: int) -> list[tuple[RequestRow, int]]:
        """The rows of a cohort and the tokens that each gives to a capacity."""
        prompts, last = self.prompts, int(self.last[cohort, capacity_at])
        if cohort < prompts.ready:
            return [(prompts.rows[cohort], last)]
        places = self.order[: self.rows[cohort]].tolist()
        whole = prompts.tokens[:, -1]
        return [*[(prompts.rows[p], int(whole[p])) for p in places[:-1]], (prompts.rows[places[-1]], last)]


def prompt_cohorts(prompts: Prompts, capacities: Ints, rows_max: int) -> PromptCohorts:
    """The cohorts of at most `rows_max` ready rows in each of `capacities` [n]."""
    ready = prompts.ready
    tokens = prompts.tokens[:ready]
    alone = PromptCohorts(
        prompts,
        np.zeros(0, np.intp),
        np.ones(ready, np.int64),
        tokens,
        tokens,
        prompts.service[:ready],
        tokens * prompts.age_ms[:ready, None] if prompts.urgency > 0.0 else None,
        prompts.stop[:ready],
    )
    if rows_max < 2 or ready < 2:
        return alone
    order = _order(prompts)[:rows_max]
    return _packed(alone, order, capacities) if len(order) > 1 else alone


def _order(prompts: Prompts) -> NDArray[np.intp]:
    """Places of the ready rows that can be served, by value per token of all that each can consume, best first."""
    whole, value = prompts.tokens[: prompts.ready, -1], prompts.service[: prompts.ready, -1]
    if prompts.urgency > 0.0:
        value = value + prompts.urgency * (whole * prompts.age_ms[: prompts.ready])
    able = whole.nonzero()[0]
    return able[(-(value[able] / whole[able])).argsort(kind="stable")]


def _packed(alone: PromptCohorts, order: NDArray[np.intp], capacities: Ints) -> PromptCohorts:
    """Add the first q = 2, 3, ... rows of `order` to the single ones: q rows fit while room is left for the last."""
    prompts, latest = alone.prompts, order[1:]
    whole = prompts.tokens[:, -1].take(order)
    before = whole.cumsum()[:-1, None]
    left = np.maximum(0, capacities - before)
    last = np.minimum(left, whole[1:, None])
    for place, request in enumerate(latest.tolist()):
        row = prompts.rows[request]
        if row.spans:
            last[place] = [chunk(row, room) if room else 0 for room in left[place].tolist()]
    ends = last == prompts.finish.take(latest)[:, None]
    service = prompts.service[:, -1].take(order).cumsum()[:-1, None] + last * prompts.token_value.take(latest)[:, None]
    service += ends * prompts.output_value.take(latest)[:, None]
    aged = alone.aged
    if aged is not None:
        age_ms = prompts.age_ms.take(order)
        aged = np.concatenate((aged, (whole * age_ms).cumsum()[:-1, None] + last * age_ms[1:, None]))
    return PromptCohorts(
        prompts,
        order,
        np.concatenate((alone.rows, np.arange(2, len(order) + 1))),
        np.concatenate((alone.tokens, (before + last) * (last > 0))),
        np.concatenate((alone.last, last)),
        np.concatenate((alone.service, service)),
        aged,
        np.concatenate((alone.stop, prompts.stop.take(latest))),
    )
