"""Accepted requests that wait for a slot, and which of them is next.

Owns the bounded queue and the service that each client has had. Does not own slots or pages. Surprising rule: a client
that comes back after a pause starts no lower than the least service of the clients that are busy, so that nobody saves
up a claim by being away (Sheng et al., "Fairness in Serving Large Language Models", arXiv:2401.00588); and no lower
than the even level, so that an endless line of new clients does not shut out one that has had more.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .execution import Request
from .ids import RequestId

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""Weights of a prompt token and an output token in a client's service, as in the paper above."""

IDLE_CLIENTS_MAX = 1024
"""Clients without requests that are remembered; beyond it the longest idle is forgotten."""


@dataclass(slots=True)
class _Client:
    weight: float
    service: float = 0.0
    active: int = 0
    waiting: deque[Request] = field(default_factory=deque)


class WaitingQueue:
    """First come, first served within a client; the client with the least token-weighted service first.

    A client's service is divided by its weight, as in the paper above: one of weight 2 is due twice the service.
    Clients that `weights` does not name have weight 1.
    """

    __slots__ = ("_clients", "_even", "_idle", "_requests", "_requests_max", "_tokens", "_tokens_max", "_weights")

    def __init__(
        self, requests_max: int | None, tokens_max: int | None, weights: Mapping[str, float] | None = None
    ) -> None:
        self._weights = dict(weights or {})
        if any(weight <= 0 for weight in self._weights.values()):
            raise ValueError("weights of clients must be positive")
        self._requests_max = requests_max
        self._tokens_max = tokens_max
        self._clients: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()
        self._even = 0.0
        """What a client of weight 1 would have had that was always busy, had all service been shared by weight among
        the busy."""
        self._requests = 0
        self._tokens = 0

    @property
    def requests(self) -> int:
        """Requests that wait."""
        return self._requests

    @property
    def tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return self._tokens

    def refuses(self, requests: int, tokens: int) -> bool:
        """Whether so many more requests, with so many prompt tokens, may not wait. None never pass a bound."""
        if not requests:
            return False
        if self._requests_max is not None and self._requests + requests > self._requests_max:
            return True
        return self._tokens_max is not None and self._tokens + tokens > self._tokens_max

    def push(self, request: Request) -> None:
        """Add a request behind its client's others."""
        name = request.spec.client
        client = self._clients.get(name)
        if client is None:
            client = self._idle.pop(name, None) or _Client(self._weights.get(name, 1.0))
            least = min((other.service for other in self._clients.values()), default=0.0)
            client.service = max(client.service, least, self._even)
            self._clients[name] = client
        client.active += 1
        client.waiting.append(request)
        self._requests += 1
        self._tokens += request.spec.prompt_tokens

    def put_back(self, request: Request) -> None:
        """Add a request that lost its slot before its client's others. No bound refuses it."""
        self._clients[request.spec.client].waiting.appendleft(request)
        self._requests += 1
        self._tokens += request.spec.prompt_tokens

    def head(self) -> Request | None:
        """The request that the next free slot goes to; among clients of equal service the earliest arrival."""
        clients = (client for client in self._clients.values() if client.waiting)
        best = min(clients, key=lambda client: (client.service, client.waiting[0].id), default=None)
        return None if best is None else best.waiting[0]

    def remove(self, request: Request) -> None:
        """Take a waiting request out, because it is admitted or cancelled."""
        self._clients[request.spec.client].waiting.remove(request)
        self._requests -= 1
        self._tokens -= request.spec.prompt_tokens

    def serve(self, client: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count validated service of one of a client's requests."""
        tokens = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        served = self._clients[client]
        served.service += tokens / served.weight
        self._even += tokens / sum([busy.weight for busy in self._clients.values()])

    def leave(self, client_name: str) -> None:
        """Say that one of a client's requests has retired."""
        client = self._clients[client_name]
        client.active -= 1
        if client.active == 0:
            del self._clients[client_name]
            self._idle[client_name] = client
            if len(self._idle) > IDLE_CLIENTS_MAX:
                self._idle.popitem(last=False)

    def service(self, client: str) -> float:
        """Token-weighted service of a client that is known, by its weight; 0 of any other. For tests."""
        known = self._clients.get(client) or self._idle.get(client)
        return known.service if known else 0.0

    def waiting_ids(self) -> list[RequestId]:
        """Ids of all waiting requests, in order of arrival. For tests."""
        return sorted(request.id for client in self._clients.values() for request in client.waiting)
