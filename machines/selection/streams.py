"""What a round of output is worth to each decoding request, at every offer of proposals.

Owns expected tokens, the price of a newcomer that decodes, and the value of decode lanes (docs/scheduling.md, "Value").
Does not own which graphs compete (`decode`) nor the urgency of streams that are blocked. Surprising rule: an offer
beyond what there is to propose for a request, or what it may still produce, is no error; its lane uses less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from .compiled import Compiled, Ints, Offer
from .lanes import Floats, Scaled, token_prices
from .premium import round_premium
from .times import Group
from .view import LaneWork, RequestRow


class Streams(NamedTuple):
    """Decoding requests with output left: the first `ready` can be served now, the others stand behind stages; each
    part is in serving order.

    `service` [w, m] is the priced service of one lane at each of `Compiled.offers`, and `token` [m] the part of it that
    one output token has; `age_ms` is [m], and so are `rates`, the greatest (expected tokens)/T over the measured graphs
    that give output, tokens/ms; 0 without any.
    """

    rows: tuple[RequestRow, ...]
    ready: int
    service: Floats
    token: Floats
    age_ms: Floats
    rates: Floats


def streams_of(
    compiled: Compiled, rounds: Group, scaled: Scaled, ready: Sequence[RequestRow], blocked: Sequence[RequestRow]
) -> Streams:
    """Price the lanes of decoding requests, which the graphs of `rounds` serve."""
    rows = (*ready, *blocked)
    if not rows:
        nothing = np.zeros((len(compiled.offers), 0))
        return Streams((), 0, nothing, nothing[0], nothing[0], nothing[0])
    left = [row.output_left for row in rows]
    scored, plain = [row.scored_survival for row in rows], [row.survival for row in rows]
    expected = expected_tokens(scored, left, compiled.depths)
    # Takes plain survival, the exponent of scores being a preference and no expectation ("Normalizers").
    likely = expected if plain == scored else expected_tokens(plain, left, compiled.depths)
    if len(compiled.copied_depths):
        copied = expected_tokens([row.copy_scored_survival for row in rows], left, compiled.copied_depths)
        expected = np.concatenate((expected, copied))
        copied = expected_tokens([row.copy_survival for row in rows], left, compiled.copied_depths)
        likely = np.concatenate((likely, copied))
    rates = (likely / rounds.least_ms[:, None]).max(axis=0)
    token = scaled.output_token_value + scaled.token_fairness * token_prices(rows, scaled, rates)
    deliveries = np.array([row.delivery_price or 0.0 for row in rows])
    service = expected * token + scaled.delivery_fairness * deliveries
    if scaled.output_time_price > 0.0:
        service += round_premium(rounds, scaled, len(ready), len(blocked))
    return Streams(rows, len(ready), service, token, np.array([row.age_ms for row in rows]), rates)


def expected_tokens(survivals: Sequence[Sequence[float]], left: Sequence[int], depths: Ints) -> Floats:
    """Expected output tokens [w, m] of a round: 1 + the survival of each proposal that its depth (`depths` rise), the
    output limit and the proposals themselves leave."""
    depth, count = int(depths[-1]), len(survivals)
    totals = np.ones((depth + 1, count))
    if depth:
        nothing = (0.0,) * depth
        flat = chain.from_iterable([s if len(s) == depth else (*s, *nothing)[:depth] for s in survivals])
        steps = np.fromiter(flat, np.float64, count * depth).reshape(count, depth)
        if min(left) <= depth:
            steps = np.where(np.arange(1, depth + 1) < np.array(left)[:, None], steps, 0.0)
        totals[1:] += steps.T.cumsum(axis=0)
    return totals.take(depths, axis=0)


def target_positions(row: RequestRow, offer: Offer) -> int:
    """Target positions of a lane in a program of `offer`: its pending token and the proposals that it can use."""
    copied, depth = offer
    return min(depth, len(row.copy_survival if copied else row.survival), row.output_left - 1) + 1 if depth else 1


def round_lane(row: RequestRow, offer: Offer, targets: int | None = None, *, allocates: bool = False) -> LaneWork:
    """The lane of a decoding request in a program of `offer`: with all that it can use, or `targets` of it.

    If the program `allocates`, `targets` are only expected, and what it can use is the lane's ceiling.
    """
    ceiling = target_positions(row, offer)
    targets = targets or ceiling
    proposals = 0.0
    # Not `sum`, whose rounding depends on the version of Python.
    for survival in (row.copy_survival if offer.copied else row.survival)[: targets - 1]:
        proposals += survival
    tokens = ceiling if allocates else targets
    return LaneWork(row.slot, row.generation, row.position, tokens, True, True, 1.0 + proposals)
