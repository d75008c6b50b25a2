"""What every kind of candidate is built from: scaled policy, scores, and a candidate spelled out.

Owns the arithmetic that kinds share (docs/scheduling.md, "Value" and "Score"). Does not own which work a kind can do
for a request. Surprising rule: requests are put in the order in which equals are served before anything is ranked, so
that a stable sort by value settles every tie among lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..graph import GraphKind, GraphShape
from .view import GraphRow, LaneWork, RequestRow, View

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NS_PER_MS = 1e6

serving_place = attrgetter("last_fence", "slot")
"""Least recently served first, then lower slots: the order in which equal lanes are served."""


class Scaled(NamedTuple):
    """The policy with all values of one decision multiplied by its scale (docs/scheduling.md, "Prices").

    The two fairness coefficients multiply prices that are scaled already. `newcomer` / r is the price of a request that
    has none yet. Times and `gap_stretch` are no values and stay as they are.
    """

    prompt_token_value: float
    output_token_value: float
    token_fairness: float
    delivery_fairness: float
    decode_age_price: float
    terminal_value: float
    terminal_age_price: float
    first_output_age_price: float
    newcomer: float
    output_time_price: float
    prompt_time_price: float
    first_output_value: float
    first_output_growth_ms: float
    first_output_urgency: float
    first_output_patience_ms: float
    gap_price: float
    gap_stretch: float

    @staticmethod
    def of(view: View, runnable: int) -> Scaled:
        """Scale the policy of a view; `runnable` counts its residents that have not ended."""
        policy, scale = view.policy, view.value_scale
        return Scaled(
            scale,
            policy.output_token_value * scale,
            policy.token_fairness,
            policy.delivery_fairness,
            policy.decode_age_price * scale,
            policy.terminal_value * scale,
            policy.terminal_age_price * scale,
            policy.first_output_age_price * scale,
            policy.newcomer_share * runnable * scale,
            policy.output_time_price * scale,
            policy.prompt_time_price * scale,
            policy.first_output_value * scale,
            policy.first_output_growth_ms,
            policy.first_output_urgency * scale,
            policy.first_output_patience_ms,
            policy.gap_price * scale,
            policy.gap_stretch,
        )


class Terms(NamedTuple):
    """Candidates of one kind, priced; arrays are [n], values are scaled.

    `service` is the priced service of the lanes, `age` the value of ending their waiting, `waiting` the cost per ms
    that the frame imposes on all that wait, `gap` that of holding up the streams (None: no price). Only `eligible` ones
    compete.
    """

    duration_ms: Floats
    service: Floats
    age: Floats
    waiting: Floats
    score: Floats
    served: Ints
    eligible: Bools
    gap: Floats | None = None


class Sequel(NamedTuple):
    """The graph that a prerequisite enables and what it would do, in the order of slots.

    `newly` counts its requests that the prerequisite enables; the others are ready already.
    """

    graph: GraphRow
    requests: tuple[RequestRow, ...]
    lanes: tuple[LaneWork, ...]
    newly: int


class Option(NamedTuple):
    """One candidate: a graph, the requests that it serves and its work for each, in the order of slots.

    `padding` counts physical positions of the graph that do no work: token positions, or rows of a stage. `terminal`
    counts the requests that it retires. `sequel`: it was chosen together with a following graph. `targets`: the target
    rows that each lane is expected to get, of a program whose rows are shared out; it `allocates` them itself.
    """

    graph: GraphRow
    requests: tuple[RequestRow, ...]
    lanes: tuple[LaneWork, ...]
    padding: int
    terminal: int = 0
    sequel: Sequel | None = None
    targets: tuple[int, ...] = ()
    allocates: bool = False


def padding(shape: GraphShape, lanes: Sequence[LaneWork]) -> int:
    """Token positions of a graph that gives tokens, less those that its lanes use.

    A mixed graph has room for its prompt capacity and, beside one prompt row, W targets for each other row.
    """
    positions = shape.prefill_tokens
    if shape.kind is GraphKind.MIXED:
        positions += (shape.batch - 1) * shape.width
    elif not positions:
        positions = shape.batch * shape.width
    return positions - sum([lane.tokens for lane in lanes])


def token_prices(rows: Sequence[RequestRow], scaled: Scaled, rates: Floats) -> Floats:
    """Scaled token prices [m]. One that is unset is the newcomer's, from the rate [m] measured now; 0 without."""
    prices = [row.token_price for row in rows]
    if None in prices:
        for place, tokens_per_ms in enumerate(rates.tolist()):
            if prices[place] is None:
                prices[place] = scaled.newcomer / tokens_per_ms if tokens_per_ms > 0.0 else 0.0
    return np.array(prices, np.float64)


def terms(
    duration_ms: Floats,
    service: Floats,
    age: Floats,
    waiting_price: float,
    *,
    served: Ints,
    eligible: Bools,
    gap: Floats | None = None,
) -> Terms:
    """Score candidates: value per ms less the waiting and the gaps imposed; an unknown graph by its priced service
    alone.

    Arrays are [n]. `waiting_price` is the sum of c over all that wait; `age` and `gap` are 0 where the duration is
    unknown.
    """
    waiting = duration_ms * (0.5 * waiting_price)
    known = np.count_nonzero(duration_ms) == len(duration_ms)
    score = (service + age) / (duration_ms if known else np.where(duration_ms > 0.0, duration_ms, 1.0)) - waiting
    if gap is not None:
        score -= gap
    return Terms(duration_ms, service, age, waiting, score, served, eligible, gap)
