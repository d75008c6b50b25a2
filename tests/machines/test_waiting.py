"""The waiting queue against its history, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flare.machines.execution import Request
from flare.machines.ids import RequestId
from flare.machines.request import RequestSpec
from flare.machines.waiting import IDLE_CLIENTS_MAX, WaitingQueue

from .oracle_waiting import WaitingOracle

CLIENTS = ("a", "b", "c")
WEIGHTS = {"a": 2.0, "b": 0.5}


def request_of(number: int, client: str, prompt_tokens: int = 10) -> Request:
    return Request(RequestId(number), RequestSpec(client, prompt_tokens, 1))


class QueueAgainstOracle(RuleBasedStateMachine):
    """Clients come and go; requests are admitted, served, cancelled and retired."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(None, None, WEIGHTS)
        self.oracle = WaitingOracle(weights=WEIGHTS)
        self.requests: dict[RequestId, Request] = {}
        self.running: dict[RequestId, str] = {}
        self.last = 0

    @rule(client=st.sampled_from(CLIENTS), tokens=st.integers(1, 50))
    def arrive(self, client: str, tokens: int) -> None:
        self.last += 1
        request = request_of(self.last, client, tokens)
        self.requests[request.id] = request
        self.queue.push(request)
        self.oracle.log.append(("arrive", client, 0))
        self.oracle.waiting[request.id] = (client, tokens)

    @precondition(lambda self: self.oracle.waiting)
    @rule()
    def admit(self) -> None:
        head = self.queue.head()
        assert head is not None
        self.queue.remove(head)
        client, _ = self.oracle.waiting.pop(head.id)
        self.running[head.id] = client

    @precondition(lambda self: self.oracle.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.oracle.waiting)))
        self.queue.remove(self.requests[request])
        client, _ = self.oracle.waiting.pop(request)
        self.queue.leave(client)
        self.oracle.log.append(("leave", client, 0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(0, 60), output=st.integers(0, 3))
    def serve(self, data: st.DataObject, prompt: int, output: int) -> None:
        client = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        self.queue.serve(client, prompt, output)
        self.oracle.log.append(("serve", client, prompt + 2 * output))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        client = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.queue.leave(client)
        self.oracle.log.append(("leave", client, 0))

    @invariant()
    def agrees(self) -> None:
        head = self.queue.head()
        assert (None if head is None else head.id) == self.oracle.head()
        service = self.oracle.service()
        assert {client: self.queue.service(client) for client in service} == service
        assert self.queue.waiting_ids() == sorted(self.oracle.waiting)
        assert self.queue.requests == len(self.oracle.waiting)
        assert self.queue.tokens == sum(tokens for _, tokens in self.oracle.waiting.values())


TestQueueAgainstOracle = QueueAgainstOracle.TestCase


def test_a_client_saves_up_no_claim_by_being_away() -> None:
    queue = WaitingQueue(None, None)
    queue.push(request_of(1, "busy"))
    queue.serve("busy", 1000, 0)
    queue.push(request_of(2, "new"))
    assert queue.service("new") == 1000


def test_a_client_of_twice_the_weight_gets_twice_the_service() -> None:
    queue = WaitingQueue(None, None, {"heavy": 2.0})
    given = {"heavy": 0, "light": 0}
    queue.push(request_of(1, "heavy"))
    queue.push(request_of(2, "light"))
    for number in range(3, 303):
        chosen = queue.head()
        assert chosen is not None
        client = chosen.spec.client
        queue.push(request_of(number, client))
        queue.remove(chosen)
        queue.serve(client, 10, 5)
        queue.leave(client)
        given[client] += 1
    assert given == {"heavy": 200, "light": 100}


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        WaitingQueue(None, None, {"nobody": 0.0})


def test_new_clients_without_end_shut_nobody_out() -> None:
    """One slot and always a new client in line: the one that has had much more is served after so many of them."""
    queue = WaitingQueue(None, None)
    queue.push(request_of(1, "much"))
    queue.push(request_of(2, "new"))
    queue.serve("much", 5000, 0)
    served: list[str] = []
    while "much" not in served:
        number = len(served) + 3
        assert number < 200
        queue.push(request_of(number, f"new-{number}"))
        chosen = queue.head()
        assert chosen is not None
        queue.remove(chosen)
        queue.serve(chosen.spec.client, 100, 50)
        queue.leave(chosen.spec.client)
        served.append(chosen.spec.client)
    assert len(served) > 1


def test_a_client_keeps_its_service_while_it_is_away() -> None:
    queue = WaitingQueue(None, None)
    first = request_of(1, "a")
    queue.push(first)
    queue.remove(first)
    queue.serve("a", 30, 10)
    queue.leave("a")
    assert queue.service("a") == 50
    queue.push(request_of(2, "a"))
    assert queue.service("a") == 50


def test_clients_that_are_away_longest_are_forgotten() -> None:
    queue = WaitingQueue(None, None)
    for number in range(IDLE_CLIENTS_MAX + 1):
        request = request_of(number, f"client-{number}")
        queue.push(request)
        queue.remove(request)
        queue.serve(request.spec.client, 5, 0)
        queue.leave(request.spec.client)
    assert queue.service("client-0") == 0
    assert queue.service("client-1") == 10


@pytest.mark.parametrize(("waiting", "more", "refused"), [(0, 2, False), (0, 3, True), (1, 1, False), (2, 1, True)])
def test_requests_beyond_the_bound_are_refused(waiting: int, more: int, refused: bool) -> None:
    queue = WaitingQueue(2, None)
    for number in range(waiting):
        queue.push(request_of(number, "a"))
    assert queue.refuses(more, more * 10) is refused


@pytest.mark.parametrize(("tokens", "refused"), [(20, False), (21, True)])
def test_tokens_beyond_the_bound_are_refused(tokens: int, refused: bool) -> None:
    queue = WaitingQueue(None, 30)
    queue.push(request_of(1, "a"))
    assert queue.refuses(1, tokens) is refused


def test_nothing_more_is_never_refused() -> None:
    queue = WaitingQueue(None, 30)
    queue.push(request_of(1, "a", 40))
    assert queue.refuses(0, 0) is False


def test_an_unbounded_queue_refuses_nothing() -> None:
    assert WaitingQueue(None, None).refuses(10_000, 10**9) is False
