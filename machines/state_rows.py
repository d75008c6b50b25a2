"""Who owns each private state row of the device.

Owns the owners and fences of the rows that snapshots are written to. Does not own what is in them (`flare/graphs`).
Surprising rule: as with pages, a row that its owner gave back is free only after the last submitted frame that uses it
has completed (docs/architecture.md, "State machines").
"""

from __future__ import annotations

from collections.abc import Mapping

from .ids import Fence, RequestId, StateRow


class StateRows:
    """Rows numbered from 0, each with one owner at most."""

    __slots__ = ("_completed", "_draining", "_free", "_owners")

    def __init__(self, rows: int) -> None:
        self._owners: list[RequestId | None] = [None] * rows
        self._free = [StateRow(row) for row in range(rows - 1, -1, -1)]
        self._draining: dict[StateRow, Fence] = {}
        self._completed = Fence(0)

    @property
    def total(self) -> int:
        """All rows."""
        return len(self._owners)

    @property
    def free(self) -> int:
        """Rows that could be allocated now."""
        return len(self._free)

    def allocate(self, owner: RequestId) -> StateRow | None:
        """Give a row to `owner`; None if none is free."""
        if not self._free:
            return None
        row = self._free.pop()
        self._owners[row] = owner
        return row

    def release(self, row: StateRow, owner: RequestId, fence: Fence) -> None:
        """Take back a row whose owner was last served by the frame `fence` (0: by none). Raises ValueError, and changes
        nothing, if it is another's."""
        if self._owners[row] != owner:
            raise ValueError(f"state row {row} is not owned by request {owner}")
        self._owners[row] = None
        if fence <= self._completed:
            self._free.append(row)
        else:
            self._draining[row] = fence

    def complete(self, fence: Fence) -> None:
        """Say that all frames up to `fence` have completed."""
        self._completed = max(self._completed, fence)
        for row in [row for row, last in self._draining.items() if last <= self._completed]:
            del self._draining[row]
            self._free.append(row)

    def check(self, owners: Mapping[StateRow, RequestId]) -> None:
        """Raise AssertionError unless the rows are owned exactly so and none is lost. For tests."""
        assert {row: owner for row, owner in enumerate(self._owners) if owner is not None} == dict(owners)
        unowned = [*self._free, *self._draining]
        assert len(unowned) == len(set(unowned)) and len(unowned) + len(owners) == self.total, "a state row is lost"
