"""Prefill candidates: one prompt row in each capacity, plain or scored.

Owns the candidates of the two prompt kinds (docs/scheduling.md, "Score"). Does not own the work itself (`prompt`).
Surprising rule: there is no smallest-fitting filter; every measured capacity competes by the tokens that it would
really consume, and only shapes that could do no more than a smaller one are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph import GraphKind
from .dominance import smallest_cover, surplus
from .lanes import Bools, Graphs, Option, Terms, graphs_of, prompting, terms, token_prices, waiting_price
from .prompt import PromptWork, prompt_work
from .reference import prompt_rates
from .view import LaneWork, Phase, RequestRow, View


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """One candidate for each pair of a prompt row [m] and a graph [g], rows first; `explored` is [m, g]."""

    terms: Terms
    graphs: Graphs
    requests: Sequence[RequestRow]
    work: PromptWork
    explored: Bools

    def option(self, index: int) -> Option:
        """The row and capacity of one candidate."""
        row, graph = divmod(index, len(self.graphs.rows))
        request = self.requests[row]
        lane = LaneWork(
            request.slot,
            request.generation,
            request.position,
            int(self.work.tokens[row, graph]),
            emits=bool(self.work.emits[row, graph]),
            delivers=False,
            expected_tokens=float(self.work.expected[row, graph]),
        )
        return Option(self.graphs.rows[graph], (request,), (lane,))

    def barred(self, index: int) -> str:
        """Why an ineligible candidate does not compete."""
        row, graph = divmod(index, len(self.graphs.rows))
        extent = self.graphs.prefill_tokens
        if not self.explored[row, graph]:
            smaller = smallest_cover(extent, self.work.endpoint[row], np.ones(len(extent), np.bool_))
            return f"unmeasured: capacity {smaller} reaches the same endpoint"
        smaller = smallest_cover(extent, self.work.reach[row], self.explored[row])
        return f"redundant: capacity {smaller} consumes the same tokens"


def prefill_pool(view: View, phase: Phase, kind: GraphKind, streams: int) -> PrefillPool | None:
    """Candidates of a prompt phase, served by the graphs of `kind` alone; None without any.

    `streams` counts the decoding requests that the frame would keep waiting.
    """
    graphs, requests = graphs_of(view, kind), prompting(view, phase)
    if not requests or not graphs.rows:
        return None
    work, policy, extent = prompt_work(requests, graphs), view.policy, graphs.prefill_tokens
    shape = work.tokens.shape
    token_part = policy.token_fairness * token_prices(view, requests, prompt_rates(work.expected, graphs))[:, None]
    service = work.tokens * (view.value_scale + token_part) + work.emits * (
        policy.output_token_value * view.value_scale + token_part
    )
    # What exploration leaves out is no alternative to anything: a measured larger graph stays.
    prepared = np.ones(shape, np.bool_)
    explored = graphs.known | ~surplus(extent, work.endpoint, prepared)
    eligible = explored & ~surplus(extent, work.reach, explored)
    count = work.tokens.size
    priced = terms(
        np.broadcast_to(graphs.duration_ms, shape).ravel(),
        service.ravel(),
        np.zeros(count),
        waiting_price(view, streams),
        served=np.ones(count, np.int64),
        padding=(extent - work.tokens).ravel(),
        eligible=eligible.ravel(),
    )
    return PrefillPool(priced, graphs, requests, work, explored)
