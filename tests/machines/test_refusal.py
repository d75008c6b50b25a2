"""Who is refused at the door: bounds hold for what would really wait, for want of a slot or of pages."""

from __future__ import annotations

import pytest

from flare.machines.waiting import WaitingQueue

from .rig import Rig


@pytest.mark.parametrize(
    ("waiting", "asked", "slots_free", "refused"),
    [
        (0, 2, 2, False),
        (0, 4, 2, False),
        (0, 5, 2, True),
        (1, 1, 0, False),
        (2, 1, 0, True),
    ],
)
def test_those_that_find_a_slot_do_not_wait(waiting: int, asked: int, slots_free: int, refused: bool) -> None:
    rig = Rig(slots=4, waiting=WaitingQueue(2, None))
    for _ in range(4 - slots_free + waiting):
        rig.arrive()
    assert rig.scheduler.waiting.requests == waiting
    assert rig.scheduler.refuses([(8, 8)] * asked) is refused


@pytest.mark.parametrize(("bound", "asked", "refused"), [(0, 2, False), (0, 3, True), (1, 3, False), (1, 4, True)])
def test_a_free_slot_without_pages_is_waited_for(bound: int, asked: int, refused: bool) -> None:
    """Pages for two requests, slots for four."""
    rig = Rig(slots=4, pages=8, waiting=WaitingQueue(bound, None))
    assert rig.scheduler.refuses([(8, 8)] * asked) is refused
    if not refused:
        for _ in range(asked):
            rig.arrive()
        assert rig.scheduler.waiting.requests <= bound


def test_nobody_overtakes_those_that_wait_for_pages() -> None:
    rig = Rig(slots=4, pages=8, waiting=WaitingQueue(1, None))
    rig.arrive(8, 8)
    rig.arrive(16, 8)
    assert rig.scheduler.waiting.requests == 1 and rig.scheduler.pages.free == 4
    assert rig.scheduler.refuses([(4, 4)])


def test_only_tokens_that_wait_are_counted() -> None:
    rig = Rig(slots=2, waiting=WaitingQueue(None, 10))
    assert not rig.scheduler.refuses([(50, 8), (50, 8), (10, 8)])
    assert rig.scheduler.refuses([(50, 8), (50, 8), (11, 8)])
