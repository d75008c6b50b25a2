"""State rows: one owner each, and none free before its last frame has completed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.ids import Fence, RequestId, StateRow
from flare.machines.state_rows import StateRows


def test_a_row_is_fenced_and_belongs_to_one() -> None:
    rows = StateRows(1)
    row = rows.allocate(RequestId(1))
    assert row == StateRow(0)
    assert rows.allocate(RequestId(2)) is None
    with pytest.raises(ValueError, match="state row 0 is not owned by request 2"):
        rows.release(row, RequestId(2), Fence(3))
    rows.release(row, RequestId(1), Fence(3))
    assert rows.allocate(RequestId(2)) is None
    rows.complete(Fence(2))
    assert rows.free == 0
    rows.complete(Fence(3))
    assert rows.allocate(RequestId(2)) == row


@given(st.integers(0, 3), st.lists(st.tuples(st.sampled_from("arc"), st.integers(0, 5), st.integers(0, 9))))
def test_against_a_plain_account(count: int, attempts: list[tuple[str, int, int]]) -> None:
    """Owners and fences in two dictionaries say the same."""
    rows, completed = StateRows(count), 0
    owners: dict[StateRow, RequestId] = {}
    fences: dict[StateRow, int] = {}
    for action, number, fence in attempts:
        owner = RequestId(number)
        if action == "a":
            row = rows.allocate(owner)
            assert (row is None) == all(r in owners or fences.get(StateRow(r), 0) > completed for r in range(count))
            if row is not None:
                assert row not in owners and fences.get(row, 0) <= completed
                owners[row] = owner
        elif action == "r" and owners:
            row = sorted(owners)[number % len(owners)]
            if owners[row] == owner:
                rows.release(row, owner, Fence(fence))
                del owners[row]
                fences[row] = fence
            else:
                with pytest.raises(ValueError, match="not owned"):
                    rows.release(row, owner, Fence(fence))
        elif action == "c":
            completed = max(completed, fence)
            rows.complete(Fence(fence))
        rows.check(owners)
        assert rows.total == count
        assert rows.free == sum(
            row not in owners and fences.get(row, 0) <= completed for row in map(StateRow, range(count))
        )
