"""What a graph that consumes prompts can do for a request, and what that is worth.

Owns the logical work of prompt lanes: tokens up to the boundary, spans that a chunk does not split, and the output
token that ends a prompt (docs/scheduling.md, "Value"). Does not own which graphs compete (`prefill`) nor several rows
in one graph (`packing`). Surprising rule: capacity beyond the boundary earns nothing, so a large graph on a short tail
is priced by the tail.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .compiled import Ints
from .lanes import Floats, Scaled, token_prices
from .premium import prompt_premium
from .times import Group
from .view import LaneWork, RequestRow


class Prompts(NamedTuple):
    """Prompt rows [m] of one phase: the first `ready` can be served now, the others stand behind stages; each part is
    in serving order.

    For every entry [n] of `Compiled.capacities`: `tokens` [m, n] that a chunk consumes, 0 where it cannot serve the
    row, and its priced `service` [m, n]. `age_ms` [m] is the wait for a first output. A chunk at whose end `horizon` ms
    have passed is worth `service + urgency * tokens * (age + horizon)`. `token_value` and `output_value` [m] price one
    unit; `finish` [m] is the distance to the end of a prompt that an output follows, -1 if none does; `stop` [m] is
    that to the next message or prompt endpoint within the boundary. `rates` [m] are the greatest (expected tokens)/T
    over the measured graphs, tokens/ms; 0 without any.
    """

    rows: tuple[RequestRow, ...]
    ready: int
    tokens: Ints
    service: Floats
    urgency: float
    age_ms: Floats
    token_value: Floats
    output_value: Floats
    finish: Ints
    stop: Ints
    rates: Floats


def prompts_of(
    capacities: Ints,
    group: Group,
    scaled: Scaled,
    waiting: int,
    ready: Sequence[RequestRow],
    blocked: Sequence[RequestRow],
) -> Prompts:
    """Price the chunks of prompt rows that the graphs of `group` serve; rows have `position` < `boundary`.

    `waiting` counts the requests that wait for a first output.
    """
    rows = (*ready, *blocked)
    if not rows:  # Most views have none of one phase, and the way below is long.
        ints, floats = np.zeros((0, len(capacities)), np.int64), np.zeros((0, len(capacities)))
        none = floats[:, 0]
        return Prompts((), 0, ints, floats, 0.0, none, none, none, ints[:, 0], ints[:, 0], none)
    reach = np.array([row.boundary - row.position for row in rows])
    endpoint = np.array([row.next_endpoint - row.position for row in rows])
    # A request that only scores its prompt has no output left and ends without a token.
    finish = np.array([row.prompt_tokens - row.position if row.output_left > 0 else -1 for row in rows])
    age_ms = np.array([row.age_ms for row in rows])
    tokens = np.minimum(reach[:, None], capacities)
    for place, row in enumerate(rows):
        if row.spans:
            tokens[place] = [chunk(row, capacity) for capacity in capacities.tolist()]
    emits = tokens == finish[:, None]
    rates = ((tokens + emits) / group.least_ms).max(axis=1)
    price = scaled.token_fairness * token_prices(rows, scaled, rates)
    token_value, output_value = scaled.prompt_token_value + price, scaled.output_token_value + price
    premium = prompt_premium(capacities, group, scaled, rows, age_ms)
    if premium is not None:
        token_value = token_value + premium
    return Prompts(
        rows,
        len(ready),
        tokens,
        tokens * token_value[:, None] + emits * output_value[:, None],
        _urgency(capacities, group, scaled, waiting),
        age_ms,
        token_value,
        output_value,
        finish,
        np.minimum(endpoint, reach),
        rates,
    )


def chunk(row: RequestRow, capacity: int) -> int:
    """Prompt tokens that a positive capacity consumes of a row: up to its boundary, and back to the start of a span
    that the chunk would end inside of. Spans are disjoint and rising; 0: the capacity cannot serve the row."""
    end = row.position + min(capacity, row.boundary - row.position)
    place = bisect_left(row.spans, (end,)) - 1
    if place >= 0 and row.spans[place][1] > end:
        end = row.spans[place][0]
    return max(0, end - row.position)


def prompt_lane(row: RequestRow, tokens: int) -> LaneWork:
    """The lane of a prompt row that consumes `tokens`."""
    emits = row.position + tokens == row.prompt_tokens and row.output_left > 0
    expected = float(tokens + emits)
    return LaneWork(row.slot, row.generation, row.position, tokens, emits, False, expected)


def _urgency(capacities: Ints, group: Group, scaled: Scaled, waiting: int) -> float:
    """Scaled value per ms of waiting that one prompt token of a row brings nearer its end; 0 without a measured rate
    (docs/scheduling.md, "Waiting for a first output").

    The reference interval of a row is its r remaining tokens at the best measured rate, times the number of those that
    wait. A chunk of n earns n/r of it, so that r itself does not matter.
    """
    if scaled.first_output_age_price == 0.0:
        return 0.0
    rate = float((capacities[:-1] / group.least_ms[:-1]).max(initial=0.0))
    return scaled.first_output_age_price * waiting / rate if rate > 0.0 else 0.0
