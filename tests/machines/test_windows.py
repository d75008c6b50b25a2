"""The machine of image windows, cell by cell and against its history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.machines.graph import GraphKind
from flare.machines.request import ImageWindow
from flare.machines.table import IllegalTransition
from flare.machines.windows import (
    TRANSITIONS,
    Drained,
    Encoded,
    Filled,
    Finished,
    Reached,
    Restored,
    Saved,
    WindowEvent,
    Windows,
    WindowState,
)

IMAGES = (ImageWindow(2, 4, 2), ImageWindow(5, 7, 1), ImageWindow(8, 9, 3))
FIRST = (Reached(), Encoded(), Filled())
EVENTS: tuple[WindowEvent, ...] = (Reached(), Drained(), Saved(), Restored(), Encoded(), Filled(), Finished())
HISTORIES: dict[WindowState, tuple[WindowEvent, ...]] = {
    WindowState.AHEAD: (),
    WindowState.FILLING: FIRST[:2],
    WindowState.ACTIVE: FIRST,
    WindowState.DRAINING: (*FIRST, Reached()),
    WindowState.SNAPSHOTTING: (*FIRST, Reached(), Drained()),
    WindowState.RESTORING: (*FIRST, Reached(), Drained(), Saved()),
    WindowState.DONE: (*FIRST, Finished()),
}


def shown(windows: Windows) -> tuple[object, ...]:
    return windows.state, windows.index, windows.encoded


def after(history: tuple[WindowEvent, ...], images: tuple[ImageWindow, ...] = IMAGES) -> Windows:
    windows = Windows(images)
    for event in history:
        windows.apply(event)
        windows.check()
    return windows


def path(images: tuple[ImageWindow, ...]) -> list[WindowEvent]:
    """All that ever happens: there is one way through the windows, told here without the table."""
    steps: list[WindowEvent] = []
    for index, image in enumerate(images):
        between: tuple[WindowEvent, ...] = (Drained(), Saved(), Restored()) if index else ()
        encoded: list[WindowEvent] = [Encoded()] * (image.operations - 1)
        steps += [Reached(), *between, *encoded, Filled()]
    return [*steps, Finished()] if images else []


def due(images: tuple[ImageWindow, ...], happened: int) -> tuple[GraphKind, ...]:
    """The stages that are due after so many steps of the path: what graphs do of it before the window is filled."""
    vision = GraphKind.VISION
    kinds = {Saved: GraphKind.SNAPSHOT, Restored: GraphKind.RESTORE, Encoded: vision, Filled: vision}
    steps, stages = path(images), list[GraphKind]()
    if happened == 0 or isinstance(steps[happened - 1], Filled | Finished):
        return ()
    for step in steps[happened:]:
        stages += [kinds[type(step)]] if type(step) in kinds else []
        if isinstance(step, Filled):
            break
    return tuple(stages)


def test_every_state_and_event_is_in_the_tests() -> None:
    assert set(HISTORIES) == set(WindowState)
    assert {type(event) for event in EVENTS} == set(WindowEvent.__args__) == {event for _, event in TRANSITIONS}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("before", WindowState, ids=lambda before: before.value)
def test_every_cell(before: WindowState, event: WindowEvent) -> None:
    """A gap of the table is refused and changes nothing; so is a window or an operation that there is not."""
    images = IMAGES[:1] if before is WindowState.DONE else IMAGES
    windows = after(HISTORIES[before], images)
    assert windows.state is before
    held = shown(windows)
    if (before, type(event)) not in TRANSITIONS:
        with pytest.raises(IllegalTransition, match=f"image windows: no transition from {before.value}"):
            windows.apply(event)
        assert shown(windows) == held
    elif event in path(images)[len(HISTORIES[before]) :][:1]:
        step = windows.apply(event)
        assert (step.before, step.after, step.cause) == (before, windows.state, type(event).__name__)
        assert windows.state is TRANSITIONS[before, type(event)]
    else:
        with pytest.raises(ValueError, match=r"window|operations"):
            windows.apply(event)
        assert shown(windows) == held
    windows.check()


@given(st.integers(0, 3), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.lists(st.sampled_from(EVENTS)))
def test_against_history(count: int, operations: list[int], noise: list[WindowEvent]) -> None:
    """Only the next step of the one path is allowed, and the stages are what it still needs."""
    images = tuple(ImageWindow(2 * i, 2 * i + 1, operations[i]) for i in range(count))
    windows, happened = Windows(images), 0
    steps = path(images)
    for event in [event for step in steps for event in (*noise[:3], step)]:
        if event == steps[happened : happened + 1][0] if happened < len(steps) else False:
            windows.apply(event)
            happened += 1
        else:
            held = shown(windows)
            with pytest.raises((IllegalTransition, ValueError)):
                windows.apply(event)
            assert shown(windows) == held
        windows.check()
        assert windows.stages() == due(images, happened)
        if windows.stages() and windows.state is not WindowState.DRAINING:
            assert windows.committed(windows.stages()[0]) == steps[happened]
        reached = sum(isinstance(step, Reached) for step in steps[:happened])
        assert windows.next_start() == (images[reached].start if reached < count else None)


def test_without_windows_nothing_is_due() -> None:
    windows = Windows(())
    assert (windows.stages(), windows.next_start()) == ((), None)
    with pytest.raises(ValueError, match="no further image window"):
        windows.apply(Reached())
