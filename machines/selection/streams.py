"""What a round of output is worth to each decoding request, at every width.

Owns expected tokens, the price of a newcomer that decodes, and the value of decode lanes (docs/scheduling.md, "Value").
Does not own which graphs compete (`decode`) nor the urgency of streams that are blocked. Surprising rule: a width
beyond what a request can propose or still produce is no error; its lane simply uses less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .compiled import Compiled, Ints
from .lanes import Floats, Scaled, token_prices
from .premium import round_premium
from .view import LaneWork, RequestRow


@dataclass(frozen=True, slots=True)
class Streams:
    """Decoding requests with output left: the first `ready` can be served now, the others stand behind stages; each
    part is in serving order.

    `service` [w, m] is the priced service of one lane at each of `Compiled.widths`; `age_ms` is [m].
    """

    rows: tuple[RequestRow, ...]
    ready: int
    service: Floats
    age_ms: Floats


def streams_of(
    compiled: Compiled, duration_ms: Floats, scaled: Scaled, ready: Sequence[RequestRow], blocked: Sequence[RequestRow]
) -> Streams:
    """Price the lanes of decoding requests; `duration_ms` [G] is that of all graphs of the catalog, 0 where unknown."""
    rows = (*ready, *blocked)
    prices = token_prices(rows, scaled, lambda some: stream_rates(compiled, duration_ms, [rows[i] for i in some]))
    deliveries = np.array([row.delivery_price or 0.0 for row in rows], np.float64)
    token = scaled.output_token_value + scaled.token_fairness * prices
    service = expected_tokens(rows, compiled.widths, scored=True) * token + scaled.delivery_fairness * deliveries
    premium = round_premium(compiled, duration_ms, scaled, len(ready), len(blocked))
    if premium is not None:
        service = service + premium
    return Streams(rows, len(ready), service, np.array([row.age_ms for row in rows], np.float64))


def expected_tokens(rows: Sequence[RequestRow], widths: Ints, *, scored: bool) -> Floats:
    """Expected output tokens [w, m] of a round: 1 + the survival of each proposal that W, the output limit and the
    proposals themselves leave. `scored`: by the estimates that scores use, else by the plain ones."""
    depth, count = int(widths[-1]) - 1, len(rows)
    totals = np.ones((count, depth + 1))
    if depth and count:
        nothing = (0.0,) * depth
        survivals = [row.scored_survival if scored else row.survival for row in rows]
        flat = chain.from_iterable([s if len(s) == depth else (*s, *nothing)[:depth] for s in survivals])
        steps = np.fromiter(flat, np.float64, count * depth).reshape(count, depth)
        left = [row.output_left for row in rows]
        if min(left) <= depth:
            steps = np.where(np.arange(1, depth + 1) < np.array(left)[:, None], steps, 0.0)
        totals[:, 1:] += steps.cumsum(axis=1)
    return totals.take(widths - 1, axis=1).T


def stream_rates(compiled: Compiled, duration_ms: Floats, rows: Sequence[RequestRow]) -> Floats:
    """The greatest (expected tokens)/T [m] over the measured graphs that give output, tokens/ms; 0 without any.

    Takes plain survival, the exponent of scores being a preference and no expectation ("Normalizers").
    """
    group = compiled.rounds
    times = duration_ms[group.index]
    of_width = group.width_at == np.arange(len(compiled.widths))[:, None]
    fastest = np.where(of_width & (times > 0.0), times, np.inf).min(axis=1, initial=np.inf)
    return np.asarray((expected_tokens(rows, compiled.widths, scored=False) / fastest[:, None]).max(axis=0))


def target_positions(row: RequestRow, width: int) -> int:
    """Target positions of a lane in a program of `width`: its pending token and the proposals that it can use."""
    if width == 1:
        return 1
    return min(width, len(row.survival) + 1, row.output_left)


def round_lane(row: RequestRow, width: int) -> LaneWork:
    """The lane of a decoding request in a program of `width`."""
    targets = target_positions(row, width)
    proposals = 0.0
    # Not `sum`, whose rounding depends on the version of Python.
    for survival in row.survival[: targets - 1]:
        proposals += survival
    return LaneWork(row.slot, row.generation, row.position, targets, True, True, 1.0 + proposals)
