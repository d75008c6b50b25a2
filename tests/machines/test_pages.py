"""The page pool against its history, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flare.machines.ids import Fence, PageId
from flare.machines.pages import PagePool

from .oracle_pages import PageOracle

PAGES = 6


class PoolAgainstOracle(RuleBasedStateMachine):
    """Takes, shares and releases pages in any order; frames are submitted and complete in theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, 4)
        self.oracle = PageOracle(PAGES)
        self.owners: list[tuple[PageId, ...]] = []
        self.submitted = 0

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > len(self.oracle.free()))
        if pages is not None:
            assert len(pages) == count
            self.oracle.given(pages)
            self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        self.pool.retain(pages)
        for page in pages:
            self.oracle.holders[page] += 1
        self.owners.append(pages)

    @rule()
    def submit(self) -> None:
        self.submitted += 1

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        fence = data.draw(st.integers(0, self.submitted))
        self.pool.release(pages, Fence(fence))
        self.oracle.released(pages, fence)

    @precondition(lambda self: self.submitted > self.oracle.completed)
    @rule()
    def complete(self) -> None:
        self.oracle.completed += 1
        self.pool.complete(Fence(self.oracle.completed))

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.free == len(self.oracle.free())
        assert self.pool.total == PAGES

    def teardown(self) -> None:
        """When all is released and done, every page is free."""
        for pages in self.owners:
            self.pool.release(pages, Fence(self.submitted))
        self.pool.complete(Fence(self.submitted))
        self.pool.check([])
        assert self.pool.free == PAGES


TestPoolAgainstOracle = PoolAgainstOracle.TestCase


def test_needed_rounds_up() -> None:
    pool = PagePool(4, 8)
    assert [pool.needed(tokens) for tokens in (0, 1, 8, 9, 16)] == [0, 1, 1, 2, 2]


def test_a_page_in_use_by_a_frame_is_not_given_again() -> None:
    pool = PagePool(2, 8)
    pages = pool.allocate(2)
    assert pages is not None
    pool.release(pages, Fence(3))
    pool.complete(Fence(2))
    assert pool.free == 0
    assert pool.allocate(1) is None
    pool.complete(Fence(3))
    assert pool.free == 2


def test_a_shared_page_waits_for_the_last_frame_of_every_owner() -> None:
    pool = PagePool(1, 8)
    pages = pool.allocate(1)
    assert pages is not None
    pool.retain(pages)
    pool.release(pages, Fence(5))
    pool.release(pages, Fence(4))
    pool.complete(Fence(4))
    assert pool.free == 0
    pool.complete(Fence(5))
    assert pool.free == 1


def test_a_page_that_no_frame_used_is_free_at_once() -> None:
    pool = PagePool(1, 8)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages, Fence(0))
    assert pool.free == 1


def test_pages_that_nobody_owns_are_neither_shared_nor_released() -> None:
    pool = PagePool(2, 8)
    owned = pool.allocate(1)
    assert owned is not None
    other = PageId(1 - owned[0])
    with pytest.raises(ValueError, match="not owned by anyone"):
        pool.retain((*owned, other))
    with pytest.raises(ValueError, match="not owned by anyone"):
        pool.release((*owned, other), Fence(0))
    pool.check([owned])


def test_check_finds_lost_and_doubled_pages() -> None:
    pool = PagePool(2, 8)
    owned = pool.allocate(1)
    assert owned is not None
    for wrong in ([], [owned, owned], [(0, 1)]):
        with pytest.raises(AssertionError, match="references differ"):
            pool.check(wrong)  # type: ignore[arg-type]
