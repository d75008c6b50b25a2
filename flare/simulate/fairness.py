"""How far clients fall apart in the service that they get.

Owns the measure (docs/simulation.md, "Figures"): over every span of time in which two clients both have requests that
wait, the difference of their token-weighted service in it; the largest is reported. The weights are those of Sheng et
al., "Fairness in Serving Large Language Models" (arXiv:2401.00588). Surprising rule: a client whose requests are all
being served takes part in no comparison, however little it gets: it asks for no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flare.machines.waiting import OUTPUT_WEIGHT, PROMPT_WEIGHT

from .outcome import Outcome


def service_gaps(outcomes: Sequence[Outcome]) -> tuple[list[int], list[float]]:
    """Instants (ns) at which anybody was served, and the largest difference within a span that lasts at each.

    A request waits from its arrival until the end of the first frame that serves it. Empty with fewer than two clients.
    """
    clients = {outcome.request.client: place for place, outcome in enumerate(outcomes)}
    if len(clients) < 2:
        return [], []
    index = {client: place for place, client in enumerate(clients)}
    served: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    waits: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.refused:
            continue
        client = index[outcome.request.client]
        waits[outcome.arrival_ns].append((client, 1))
        if outcome.begun_ns is not None:
            waits[outcome.begun_ns].append((client, -1))
        for at_ns, tokens in outcome.prompts:
            served[at_ns].append((client, PROMPT_WEIGHT * tokens))
        for at_ns in outcome.tokens:
            served[at_ns].append((client, OUTPUT_WEIGHT))
    return _walk(len(clients), served, waits)


def _walk(
    clients: int, served: dict[int, list[tuple[int, int]]], waits: dict[int, list[tuple[int, int]]]
) -> tuple[list[int], list[float]]:
    service: NDArray[np.float64] = np.zeros(clients)
    waiting: NDArray[np.int64] = np.zeros(clients, np.int64)
    spans = _Spans(clients)
    instants, values = [], []
    for at_ns in sorted(served.keys() | waits.keys()):
        # What a frame gave, it gave while those that it first served were still waiting.
        for client, weight in served.get(at_ns, ()):
            service[client] += weight
        if at_ns in served:
            instants.append(at_ns)
            values.append(spans.widen(service))
        if at_ns in waits:
            for client, change in waits[at_ns]:
                waiting[client] += change
            spans.restart(service, waiting > 0)
    return instants, values


class _Spans:
    """The least and greatest difference of each pair since both have waited."""

    def __init__(self, clients: int) -> None:
        self._joint: NDArray[np.bool_] = np.zeros((clients, clients), np.bool_)
        self._least: NDArray[np.float64] = np.zeros((clients, clients))
        self._greatest: NDArray[np.float64] = np.zeros((clients, clients))

    def restart(self, service: NDArray[np.float64], waits: NDArray[np.bool_]) -> None:
        """Begin the spans of pairs that wait together from now on, and end those of others."""
        joint = waits[:, None] & waits[None, :]
        fresh = joint & ~self._joint
        if fresh.any():
            apart = service[:, None] - service[None, :]
            self._least[fresh] = apart[fresh]
            self._greatest[fresh] = apart[fresh]
        self._joint = joint

    def widen(self, service: NDArray[np.float64]) -> float:
        """Count what was served; the widest span of those that last."""
        apart = service[:, None] - service[None, :]
        np.minimum(self._least, apart, out=self._least)
        np.maximum(self._greatest, apart, out=self._greatest)
        return float(np.max(self._greatest - self._least, where=self._joint, initial=0.0))
