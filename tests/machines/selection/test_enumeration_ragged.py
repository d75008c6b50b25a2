"""How good the search for a ragged program's cohort is: against every cohort with every way to share out its rows. `-s`
prints the figures; `tools/ragged_misses.py` has more of them."""

from __future__ import annotations

from itertools import combinations, product

import msgspec
import pytest

from flare.machines.selection.board import Board
from flare.machines.selection.ragged import Share, Sharing
from flare.machines.selection.view import View
from tests.machines.oracle.values import Values, targets
from tools.ragged_misses import greatest, instance, loss, main

CASES = 60
SIZES = [(2, 3), (3, 4), (4, 3), (5, 4), (6, 3)]


def shared(view: View) -> Share:
    board = Board.of(view)
    (place,) = board.compiled.shared
    return Sharing(board).share(place)


def value(view: View, share: Share) -> float:
    return share.service + share.aged + Board.of(view).urgency * view.graphs[0].duration_ns / 1e6 * len(share.rows)


@pytest.mark.parametrize(("batch", "width"), SIZES)
@pytest.mark.parametrize("equal", [True, False])
def test_the_bounded_search_is_never_better_than_the_best_of_all(batch: int, width: int, equal: bool) -> None:
    losses = [loss(instance(f"{batch}/{width}/{n}", batch, width, equal=equal)) for n in range(CASES)]
    assert min(one.share for one in losses) >= -1e-12
    for device in (False, True):
        mine = [one.share for one in losses if one.device is device]
        missed = sum(share > 1e-12 for share in mine)
        print(f"\nb{batch}w{width} {device=} {equal=}: {missed} of {len(mine)} miss {sum(mine) / len(mine):.2%}")


@pytest.mark.parametrize(("batch", "width"), SIZES)
def test_kept_prefixes_are_the_best_of_all_subsets(batch: int, width: int) -> None:
    for number in range(CASES):
        view = msgspec.structs.replace(instance(f"kept/{number}", batch, width, equal=False), keeps_prefixes=True)
        values, shape, ms = Values(view, float), view.graphs[0].shape, view.graphs[0].duration_ns / 1e6
        lanes = [values.decode_lane(row, shape) for row in view.requests]
        best = max(
            sum(lane.value(ms) for lane in chosen)
            for size in range(1, batch + 1)
            for chosen in combinations(lanes, size)
            if sum(lane.tokens for lane in chosen) <= shape.packed_targets
        )
        share = shared(view)
        assert value(view, share) == pytest.approx(best, rel=1e-12)
        assert share.rows == tuple(targets(row, shape) for row in share.members)
        assert sum(share.rows) <= shape.packed_targets


@pytest.mark.parametrize(("batch", "width"), SIZES)
def test_no_cohort_is_worth_more_than_the_bound(batch: int, width: int) -> None:
    for number in range(CASES):
        drawn = instance(f"bound/{number}", batch, width, equal=False)
        for device in (False, True):
            view = msgspec.structs.replace(drawn, device_allocates=device)
            board = Board.of(view)
            (place,) = board.compiled.shared
            most = Sharing(board).most(place, view.graphs[0].duration_ns / 1e6)
            assert value(view, shared(view)) <= most * (1 + 1e-12)


def test_the_enumeration_tries_all_lengths() -> None:
    for number in range(20):
        view = instance(f"all/{number}", 2, 3, equal=False)
        values, shape = Values(view, float), view.graphs[0].shape
        worth = [
            [values.decode_lane(row, shape, n).value(5.0) for n in range(1, targets(row, shape) + 1)]
            for row in view.requests
        ]
        best = 0.0
        for lengths in product(*(range(len(lane) + 1) for lane in worth)):
            if sum(map(bool, lengths)) <= shape.batch and sum(lengths) <= shape.packed_targets:
                best = max(best, sum(lane[n - 1] for lane, n in zip(worth, lengths, strict=True) if n))
        assert greatest(worth, shape.batch, shape.packed_targets) == pytest.approx(best, rel=1e-12)


def test_the_tool_prints_a_line_for_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ragged_misses", "--instances", "2"])
    main()
    assert len(capsys.readouterr().out.splitlines()) == 17
