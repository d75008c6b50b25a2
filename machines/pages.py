"""Who owns each page of the KV cache.

Owns reference counts and fences of pages. Does not own their storage (`flare/graphs`). Surprising rule: a page
without references is not free before the last submitted frame that uses it has completed, because that frame may still
read or write it (docs/scheduling.md, "Slots and pages").
"""

from __future__ import annotations

from collections.abc import Sequence

from .ids import Fence, PageId


class PagePool:
    """Reference-counted, fenced pages numbered from 0."""

    __slots__ = ("_completed", "_draining", "_fences", "_free", "_references", "page_tokens")

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._references = [0] * pages
        self._fences = [0] * pages
        self._free = [PageId(page) for page in range(pages - 1, -1, -1)]
        self._draining: dict[PageId, int] = {}
        self._completed = 0

    def needed(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    @property
    def total(self) -> int:
        """All pages."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Pages that could be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[PageId, ...] | None:
        """Take `count` pages with one reference each, or nothing (None) if there are not so many."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Sequence[PageId]) -> None:
        """Add a reference to pages that are owned already; ValueError, and no change, if one is not."""
        self._check_owned(pages)
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[PageId], fence: Fence) -> None:
        """Drop a reference whose owner was last served by the frame `fence` (0: by none).

        A page without references is free once the last frame that any of its owners named has completed. Raises
        ValueError, and changes nothing, if a page has no owner.
        """
        self._check_owned(pages)
        for page in pages:
            self._references[page] -= 1
            self._fences[page] = max(self._fences[page], fence)
            if self._references[page] == 0:
                if self._fences[page] <= self._completed:
                    self._free.append(page)
                else:
                    self._draining[page] = self._fences[page]

    def complete(self, fence: Fence) -> None:
        """Say that all frames up to `fence` have completed."""
        self._completed = max(self._completed, fence)
        if self._draining:
            done = [page for page, last in self._draining.items() if last <= self._completed]
            for page in done:
                del self._draining[page]
                self._free.append(page)

    def _check_owned(self, pages: Sequence[PageId]) -> None:
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is not owned by anyone")

    def check(self, owners: Sequence[Sequence[PageId]]) -> None:
        """Raise AssertionError unless the references are exactly those of `owners` and no page is lost. For tests."""
        counts = [0] * self.total
        for pages in owners:
            for page in pages:
                counts[page] += 1
        assert counts == self._references, "references differ from owners"
        unowned = [*self._free, *self._draining]
        assert len(unowned) == len(set(unowned)), "a page is free twice"
        assert set(unowned) == {page for page, count in enumerate(counts) if count == 0}, "a page is lost"
