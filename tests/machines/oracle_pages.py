"""Who may have a page, told from everything that was ever done with it.

Owns the rule of docs/scheduling.md, "Slots and pages": a page may be given again once nobody holds it and every frame
that a former holder named has completed. Surprising rule: it keeps all fences that were ever named, where the pool
keeps one for each page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flare.machines.ids import PageId


@dataclass
class PageOracle:
    """All pages of a pool."""

    pages: int
    holders: dict[PageId, int] = field(default_factory=dict)
    named: dict[PageId, list[int]] = field(default_factory=dict)
    completed: int = 0

    def free(self) -> set[PageId]:
        """Pages that may be given now."""
        return {
            PageId(page)
            for page in range(self.pages)
            if not self.holders.get(PageId(page))
            and all(fence <= self.completed for fence in self.named.get(PageId(page), ()))
        }

    def given(self, pages: Sequence[PageId]) -> None:
        """Raises AssertionError if one of them might not be given."""
        assert len(set(pages)) == len(pages)
        assert self.free().issuperset(pages)
        for page in pages:
            self.holders[page] = 1

    def released(self, pages: Sequence[PageId], fence: int) -> None:
        """One holder of each, whom frame `fence` served last, lets go."""
        for page in pages:
            self.holders[page] -= 1
            self.named.setdefault(page, []).append(fence)
