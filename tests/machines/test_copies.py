"""Proposals that the host copies: what a view says of them, what a commit allows, and what is learned."""

from __future__ import annotations

import pytest

from flare.machines.commitment import CommitRefused
from flare.machines.events import CopyOffered
from flare.machines.execution import Request
from flare.machines.graph import Source
from flare.machines.ids import RequestId
from flare.machines.selection.view import Reason, RequestRow

from .rig import CATALOG, COPIES, ROUND, Rig, decode
from .test_rounds import beliefs, committed, round_of
from .test_snapshot import row

BOTH = (*CATALOG, ROUND, COPIES)


def offered(proposals: int = 2, alpha: float = 1.0) -> tuple[Rig, Request]:
    rig = Rig(catalog=BOTH, alpha=alpha)
    (request,) = rig.decoding(1, max_tokens=40)
    rig.scheduler.apply(CopyOffered(request.id, proposals), rig.now_ns)
    return rig, request


def seen(rig: Rig, request: Request) -> RequestRow:
    return row(rig.scheduler.view(rig.now_ns), request)


def test_a_view_has_as_many_copies_as_are_offered() -> None:
    rig, request = offered(2, alpha=2.0)
    before = seen(rig, request)
    assert (before.copy_survival, before.copy_scored_survival) == ((0.5, 0.25), (0.25, 0.0625))
    assert (before.survival, before.scored_survival) == ((0.5, 0.25, 0.125), (0.25, 0.0625, 0.015625))
    rig.scheduler.apply(CopyOffered(request.id, 9), rig.now_ns)
    assert seen(rig, request).copy_survival == (0.5, 0.25, 0.125)
    rig.scheduler.apply(CopyOffered(request.id, 0), rig.now_ns)
    assert seen(rig, request).copy_survival == ()


def test_an_offer_to_nobody_is_harmless() -> None:
    rig, _ = offered()
    assert rig.scheduler.apply(CopyOffered(RequestId(99), 3), rig.now_ns) == []


def test_what_was_offered_is_gone_once_the_request_goes_on() -> None:
    rig, request = offered()
    rig.commit(decode(request))
    assert request.offered == 2
    rig.complete(after_ms=10)
    assert request.offered == 0 and seen(rig, request).copy_survival == ()


def test_a_round_of_copies_is_as_wide_as_the_offer() -> None:
    rig, request = offered(2)
    with pytest.raises(CommitRefused, match="for 4 targets: its reach is 3"):
        rig.commit(round_of(request, 4, COPIES))
    rig.commit(round_of(request, 3, COPIES))


def test_copies_need_completion_feedback() -> None:
    rig, request = offered()
    rig.commit(decode(request))
    with pytest.raises(CommitRefused, match="needs completion feedback"):
        rig.commit(round_of(request, 2, COPIES))
    rig, request = offered()
    rig.commit(round_of(request, 2, COPIES))
    rig.commit(decode(request))


def test_each_source_learns_from_its_own_rounds() -> None:
    rig, request = offered(3)
    before = beliefs(request).forecast
    rig.commit(round_of(request, 4, COPIES))
    committed(rig, request, 4)
    known = beliefs(request).acceptance
    assert known[Source.COPY].survival[2] > 0.125 and known[Source.DRAFT].survival == (0.5, 0.25, 0.125)
    assert before is not None and before.survival == (0.5, 0.25, 0.125)
    newcomer = beliefs(rig.arrive(8)).acceptance
    assert newcomer[Source.COPY].survival[0] == 0.5 + 0.5 / 64 and newcomer[Source.DRAFT].survival[0] == 0.5


def test_a_catalog_of_copies_alone_has_no_drafts() -> None:
    rig = Rig(catalog=(*CATALOG, COPIES))
    (request,) = rig.decoding(1)
    rig.scheduler.apply(CopyOffered(request.id, 1), rig.now_ns)
    found = seen(rig, request)
    assert (found.survival, found.forecast, found.copy_survival) == ((), (), (0.5,))
    assert Reason.ACCEPTANCE_PROBE in rig.scheduler.ledgers.by_reason


def test_nothing_is_copied_where_the_host_must_see_every_token() -> None:
    rig = Rig(catalog=BOTH)
    (request,) = rig.decoding(1, needs_feedback=True)
    rig.scheduler.apply(CopyOffered(request.id, 3), rig.now_ns)
    assert seen(rig, request).copy_survival == ()
    with pytest.raises(CommitRefused, match="for 2 targets: its reach is 1"):
        rig.commit(round_of(request, 2, COPIES))


def test_optimism_is_in_a_view_while_a_probe_is_funded() -> None:
    """Raised to the exponent, cut to what is offered, and aged with the output; not of a prompt."""
    rig, request = offered(2, alpha=2.0)
    assert seen(rig, request).optimistic == seen(rig, request).weights == ()
    rig.commit(decode(request))
    rig.complete(after_ms=600, device_ms=600)
    rig.scheduler.apply(CopyOffered(request.id, 1), rig.now_ns)
    prompt, found = rig.arrive(8), seen(rig, request)
    assert rig.scheduler.view(rig.now_ns).probe_funded
    drafts = beliefs(request).acceptance[Source.DRAFT]
    assert found.optimistic == tuple(bound**2.0 for bound in drafts.optimistic(drafts.weights(2)))
    assert found.weights == drafts.weights(2) == (2.0 * 2.0 ** (-2 / 128),) * 3
    assert (found.copy_optimistic, found.copy_weights) == (found.optimistic[:1], found.weights[:1])
    assert seen(rig, prompt).optimistic == seen(rig, prompt).weights == ()
