"""The host's part of a frame that waited for the one before it."""

from __future__ import annotations

from itertools import pairwise

from flare.machines.host_gap import HostGap
from flare.machines.slot import Execute, Submit

from .rig import MS, Rig, decode


def observed(*frames: tuple[int, int, int, bool]) -> float:
    """The gap after frames that were (submitted, ended, device time, isolated) in ms."""
    gap = HostGap()
    for at, end, device, isolated in frames:
        gap.observe(Submit(at * MS, 0, isolated), Execute(end * MS, device * MS))
    return gap.ms


def test_a_frame_in_the_instant_of_a_completion_tells_what_the_host_added() -> None:
    assert observed((0, 10, 5, True)) == 0.0
    assert observed((0, 10, 5, True), (10, 18, 5, True)) == 3.0


def test_other_frames_tell_nothing() -> None:
    """One that came later, one behind another, one that was not timed; never less than nothing."""
    first = (0, 10, 5, True)
    assert observed(first, (11, 19, 5, True)) == 0.0
    assert observed(first, (10, 19, 5, False)) == 0.0
    assert observed(first, (10, 19, 0, True)) == 0.0
    assert observed(first, (10, 19, 12, True)) == 0.0
    assert observed(first, (10, 19, 0, True), (19, 26, 5, True)) == 2.0


def test_it_is_the_median_of_the_last_nine() -> None:
    ends = [10]
    gaps = [90, 90, 90, 90, 90, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    for gap in gaps:
        ends.append(ends[-1] + 5 + gap)
    frames = [(at, end, 5, True) for at, end in pairwise(ends)]
    assert observed((0, 10, 5, True), *frames) == 5.0
    assert observed((0, 10, 5, True), *frames[4:]) == 5.0
    assert observed((0, 10, 5, True), *frames[:7]) == 90.0


def test_a_view_has_it_only_where_it_has_a_price() -> None:
    priced, plain = Rig(host_gap_pricing=True), Rig()
    for rig in (priced, plain):
        rig.decoding(1)
        for _ in range(2):
            rig.commit(decode(rig.scheduler.residents[0]))
            rig.complete(after_ms=13)
        assert rig.scheduler.host_gap.ms > 0.0
    assert priced.scheduler.view(priced.now_ns).host_gap_ms == priced.scheduler.host_gap.ms
    assert plain.scheduler.view(plain.now_ns).host_gap_ms == 0.0
