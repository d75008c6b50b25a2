"""Who is next, told from all that clients asked for and were given.

Owns the rule of docs/scheduling.md, "Slots and pages", for clients, after Sheng et al., "Fairness in Serving Large
Language Models" (arXiv:2401.00588). Surprising rule: a client's claim is worked out anew from the whole history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flare.machines.ids import RequestId


@dataclass
class WaitingOracle:
    """`log` holds ("arrive" | "leave", client, 0) and ("serve", client, weighted tokens), in order."""

    log: list[tuple[str, str, int]] = field(default_factory=list)
    waiting: dict[RequestId, tuple[str, int]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def service(self) -> dict[str, float]:
        """Each client's service by its weight, lifted whenever it came back from having nothing."""
        even = 0.0
        service: dict[str, float] = {}
        active: dict[str, int] = {}
        for what, client, tokens in self.log:
            if what == "serve":
                service[client] += tokens / self.weights.get(client, 1.0)
                even += tokens / sum([self.weights.get(busy, 1.0) for busy, count in active.items() if count])
            elif what == "leave":
                active[client] -= 1
            else:
                if not active.get(client):
                    busy = [service[other] for other, count in active.items() if count]
                    service[client] = max(service.get(client, 0), min(busy, default=0.0), even)
                active[client] = active.get(client, 0) + 1
        return service

    def head(self) -> RequestId | None:
        """Of the clients that wait, the one with the least service; among equals the earliest request."""
        service = self.service()
        earliest: dict[str, RequestId] = {}
        for request, (client, _) in sorted(self.waiting.items()):
            earliest.setdefault(client, request)
        return min(earliest.values(), key=lambda request: (service[self.waiting[request][0]], request), default=None)
