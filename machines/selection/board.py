"""All that one decision reads, sorted out and priced once.

Owns the split of a view's requests into streams, prompts and terminal rows, ready and blocked, with what every
candidate pays (docs/scheduling.md, "Score" and "Gap price"). Does not own candidates. Surprising rule: what is blocked
behind stages is priced as well, since a prerequisite may be chosen for what it enables.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cohort import Ranking, rank
from .compiled import Compiled
from .gaps import Gaps
from .interval import reference_interval
from .lanes import Floats, Scaled, serving_place
from .packing import PromptCohorts, prompt_cohorts
from .prompt import Prompts, prompts_of
from .streams import Streams, streams_of
from .times import Times
from .view import Phase, RequestRow, View

# Members of an enumeration are slow to look up.
DECODE, TERMINAL, PREFILL = Phase.DECODE, Phase.TERMINAL, Phase.PREFILL


class Board(NamedTuple):
    """One view, ready for every pool.

    `age_bearing` is K, `waiting_price` the sum of c over all that wait, scaled; `first_waiting` is n_w. `sigma_ms` is
    the reference interval of a ready stream, None if not measured, and `urgency` c * sigma, 0.0 without. `best` ranks
    the ready streams for measured graphs, `plain` by service alone for unknown ones.
    `gap_cost` [G] is what `gaps` charge each graph, 0 where unknown; both are None where gaps have no price.
    """

    view: View
    compiled: Compiled
    scaled: Scaled
    times: Times
    streams: Streams
    prompts: Prompts
    scored: Prompts
    terminals: list[RequestRow]
    age_bearing: int
    first_waiting: int
    waiting_price: float
    sigma_ms: float | None
    urgency: float
    best: Ranking
    plain: Ranking
    prompt_cohorts: PromptCohorts
    scored_cohorts: PromptCohorts
    gaps: Gaps | None
    gap_cost: Floats | None

    @staticmethod
    def of(view: View, compiled: Compiled | None = None) -> Board:
        """Sort out and price a view; `compiled` is that of its graphs, in their order, and made here if not given.

        Raises ValueError for another catalog.
        """
        if compiled is None:
            compiled = Compiled.of([row.shape for row in view.graphs])
        if len(compiled.shapes) != len(view.graphs):
            raise ValueError(f"a catalog of {len(compiled.shapes)} graphs for a view of {len(view.graphs)}")
        times = Times.of(compiled, view.graphs, view.host_gap_ms)
        # Ready ones first, blocked ones second.
        decoding: tuple[list[RequestRow], list[RequestRow]] = ([], [])
        prompting: tuple[list[RequestRow], list[RequestRow]] = ([], [])
        scoring: tuple[list[RequestRow], list[RequestRow]] = ([], [])
        terminals: list[RequestRow] = []
        waiting = view.queued_requests
        for row in sorted(view.requests, key=serving_place):
            phase = row.phase
            if phase is DECODE:
                if row.output_left > 0:
                    decoding[1 if row.stages else 0].append(row)
            elif phase is TERMINAL:
                terminals.append(row)
            else:
                waiting += 1
                if row.position < row.boundary:
                    (prompting if phase is PREFILL else scoring)[1 if row.stages else 0].append(row)
        scaled = Scaled.of(view, len(view.requests) - len(terminals))
        streams = streams_of(compiled, times.rounds, scaled, *decoding)
        prompts = prompts_of(compiled.capacities, times.prompts, scaled, waiting, *prompting)
        scored = prompts_of(compiled.capacities, times.scored, scaled, waiting, *scoring)
        age_bearing, ready = len(streams.rows) + len(terminals), streams.ready
        sigma_ms = reference_interval(times.rounds.ms, compiled.rounds.batch, ready, age_bearing)
        urgency = scaled.decode_age_price * (sigma_ms or 0.0)
        service, age_ms = streams.service[:, :ready], streams.age_ms[:ready]
        best = rank(service, np.full(ready, urgency), age_ms)
        gaps = Gaps.of(scaled, sigma_ms, age_bearing, streams.age_ms)
        gap_cost = None if gaps is None else gaps.cost(times.spent_ms)
        if gap_cost is not None and not times.known:
            gap_cost[times.ms == 0.0] = 0.0
        return Board(
            view,
            compiled,
            scaled,
            times,
            streams,
            prompts,
            scored,
            terminals,
            age_bearing,
            waiting,
            scaled.decode_age_price * len(streams.rows)
            + scaled.terminal_age_price * len(terminals)
            + scaled.first_output_age_price * waiting,
            sigma_ms,
            urgency,
            best,
            best if times.known or urgency == 0.0 else rank(service, np.zeros(ready), age_ms),
            prompt_cohorts(prompts, compiled.capacities, compiled.prompts.rows_max),
            prompt_cohorts(scored, compiled.capacities, compiled.scored.rows_max),
            gaps,
            gap_cost,
        )
