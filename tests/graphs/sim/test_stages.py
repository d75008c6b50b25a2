"""State operations: what each refuses, by name. What they do to a row's output is for `conformance_stages`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flare.graphs.frames import LaneInput, Sampling
from flare.graphs.sim.state import PageConflict
from flare.machines.graph import GraphShape
from flare.machines.request import ImageWindow
from tests.graphs.conformance_stages import INITIALIZE, RESTORE, RESUME, SNAPSHOT, STAGE, TERMINAL, VISION
from tests.graphs.host import (
    CATALOG,
    DECODE,
    PREFILL,
    Host,
    Row,
    banning,
    decode_lane,
    prompt_lane,
    prompt_of,
    stage_lane,
)
from tests.graphs.sim.rig import sim_host

WINDOWS = (ImageWindow(4, 8, 2), ImageWindow(12, 14, 1))


def host_of() -> Host:
    """A device with two state rows."""
    return sim_host((*CATALOG, *STAGE.values()))


def at(host: Host, position: int, slot: int = 0, windows: tuple[ImageWindow, ...] = ()) -> Row:
    """A row inside its prompt of 20 tokens."""
    row = host.admit(slot, prompt_of(20, slot), sampling=Sampling(seed=slot), windows=windows)
    if position:
        host.serve(PREFILL, [(row, prompt_lane(row, position))])
    return row


def at_second_window(host: Host) -> Row:
    """A row that stands where its second window begins."""
    row = at(host, 4, windows=WINDOWS)
    for operation in (0, 1):
        host.serve(VISION, [(row, stage_lane(row, operation=operation))])
    host.serve(PREFILL, [(row, prompt_lane(row, 8))])
    return row


def save(host: Host, row: Row, state_row: int = 0, shape: GraphShape = SNAPSHOT) -> None:
    """Save a row's state; a terminal snapshot retires it."""
    host.serve(shape, [(row, stage_lane(row, state_row=state_row))])


def again(host: Host, row: Row, slot: int | None = None, state_row: int = 0) -> LaneInput:
    """A lane that takes the state into a fresh generation."""
    host.rebind(row, slot)
    return stage_lane(row, state_row=state_row)


def stale_state(host: Host) -> LaneInput:
    row = at(host, 3, windows=WINDOWS)
    save(host, row)
    host.serve(PREFILL, [(row, prompt_lane(row, 1))])
    return again(host, row)


def overwritten_state(host: Host) -> LaneInput:
    row = at_second_window(host)
    save(host, row)
    save(host, at(host, 5, slot=1))
    return again(host, row)


def no_window_here(host: Host) -> LaneInput:
    row = at(host, 4, windows=WINDOWS)
    for operation in (0, 1):
        host.serve(VISION, [(row, stage_lane(row, operation=operation))])
    host.serve(PREFILL, [(row, prompt_lane(row, 5))])
    save(host, row)
    return again(host, row)


def restored_elsewhere(host: Host) -> LaneInput:
    row = at_second_window(host)
    save(host, row)
    return again(host, row, slot=2)


def bound_otherwise(host: Host) -> LaneInput:
    row = at_second_window(host)
    save(host, row)
    row.binding = replace(row.binding, output_limit=7)
    return again(host, row)


def wrong_place(host: Host) -> LaneInput:
    row = at_second_window(host)
    save(host, row)
    return replace(again(host, row), start=11)


def resumed_from_a_copy(host: Host) -> LaneInput:
    row = at(host, 5)
    save(host, row)
    return again(host, row, slot=1)


def resumed_twice(host: Host) -> LaneInput:
    row = at(host, 5)
    save(host, row, shape=TERMINAL)
    host.serve(RESUME, [(row, again(host, row, slot=1))])
    return again(host, row, slot=2)


def resumed_by_another(host: Host) -> LaneInput:
    row, other = at(host, 5), at(host, 5, slot=1)
    save(host, row, shape=TERMINAL)
    save(host, other, state_row=1, shape=TERMINAL)
    return again(host, row, slot=2, state_row=1)


def resumed_without_room(host: Host) -> LaneInput:
    row = at(host, 18)
    save(host, row, shape=TERMINAL)
    lane = again(host, row, slot=1)
    return replace(lane, binding=replace(row.binding, pages=row.binding.pages[:1]))


def resumed_without_binding(host: Host) -> LaneInput:
    row = at(host, 5)
    save(host, row, shape=TERMINAL)
    other = at(host, 5, slot=1)
    return stage_lane(other, state_row=0)


def ended(host: Host) -> Row:
    row = host.admit(0, prompt_of(4, 0), output_limit=1)
    host.prefill(row)
    return row


def without_tokens(host: Host) -> LaneInput:
    return stage_lane(at(host, 0))


def inside_a_span(host: Host) -> LaneInput:
    return stage_lane(host.admit(0, prompt_of(20, 0), spans=((3, 9),)), restored=5)


def longer_than_its_pages(host: Host) -> LaneInput:
    row = host.admit(0, prompt_of(60, 0))
    return replace(stage_lane(row, restored=50), binding=replace(row.binding, pages=row.binding.pages[:3]))


def banned(host: Host) -> LaneInput:
    return replace(stage_lane(at(host, 5), state_row=0), history=banning(3))


REFUSALS: dict[str, tuple[GraphShape, Callable[[Host], LaneInput], str]] = {
    "a state that the row has left behind": (RESTORE, stale_state, "has gone on since state row 0 was saved"),
    "a state row that another has overwritten": (RESTORE, overwritten_state, "which is of .*slot=1"),
    "no window begins here": (RESTORE, no_window_here, "no further image window begins at 9"),
    "restored into another slot": (RESTORE, restored_elsewhere, "cannot restore state row 0"),
    "restored with another binding": (RESTORE, bound_otherwise, "bound otherwise"),
    "restored at another place": (RESTORE, wrong_place, "is taken to stand at 11, but its state is that of 12"),
    "an empty state row": (RESTORE, lambda host: again(host, at_second_window(host)), "state row 0 is empty"),
    "a state row that is not there": (SNAPSHOT, lambda host: stage_lane(at(host, 5), state_row=2), "row 2 of 2"),
    "resumed from a snapshot": (RESUME, resumed_from_a_copy, "which was not retired"),
    "resumed twice": (RESUME, resumed_twice, "state row 0 is empty"),
    "resumed by another request": (RESUME, resumed_by_another, "bound otherwise than .*slot=1"),
    "resumed without room": (RESUME, resumed_without_room, "would write position 17; its pages hold 16"),
    "resumed without a fresh generation": (RESUME, resumed_without_binding, "without a state row or a fresh"),
    "resumed from nowhere": (RESUME, lambda host: stage_lane(at(host, 0)), "without a state row or a fresh"),
    "an ended row is saved": (SNAPSHOT, lambda host: stage_lane(ended(host), state_row=0), "has ended"),
    "an ended row is preempted": (TERMINAL, lambda host: stage_lane(ended(host), state_row=0), "has ended"),
    "retired inside the prompt": (TERMINAL, lambda host: stage_lane(at(host, 5)), "inside its prompt, at 5"),
    "restored from nothing": (RESTORE, without_tokens, "neither a state row nor a prefix"),
    "restored behind the start": (RESTORE, lambda host: stage_lane(at(host, 5), restored=9), "but stands at 5"),
    "restored into a span": (RESTORE, inside_a_span, "would stop at 5, inside the span from 3 to 9"),
    "restored beyond the pages": (RESTORE, longer_than_its_pages, "would write position 49; its pages hold 48"),
    "no images": (VISION, lambda host: stage_lane(at(host, 5)), "has no images to encode"),
    "images out of order": (
        VISION,
        lambda host: stage_lane(at(host, 4, windows=WINDOWS), operation=1),
        "operation 1 in window 0; 0 of 2 are done",
    ),
    "a further operation": (
        VISION,
        lambda host: stage_lane(at_second_window(host), operation=2),
        "operation 2 in window 0; 2 of 2 are done",
    ),
    "into a window without images": (
        PREFILL,
        lambda host: prompt_lane(at(host, 2, windows=WINDOWS), 3),
        "would pass 4 after 0 of 2 image operations",
    ),
    "into the next window": (
        PREFILL,
        lambda host: prompt_lane(at_second_window(host), 1),
        "would pass 12, where another image window begins",
    ),
    "a history": (SNAPSHOT, banned, "with tokens, drafts or a history"),
    "initialized without need": (INITIALIZE, lambda host: stage_lane(at(host, 0)), "need not be"),
    "initialized elsewhere": (INITIALIZE, lambda host: replace(stage_lane(at(host, 5)), start=4), "to stand at 4"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_what_is_wrong(case: str) -> None:
    shape, lane_of, message = REFUSALS[case]
    host = host_of()
    error = host.run(shape, [lane_of(host)]).error
    assert error is not None
    assert re.search(message, error), error


def test_operations_need_the_initialization_first() -> None:
    host = host_of()
    row = host.admit(0, prompt_of(20, 0), initialize=True, windows=WINDOWS)
    for shape in (VISION, SNAPSHOT, TERMINAL):
        lane = stage_lane(row, state_row=None if shape is VISION else 0)
        assert "has to be initialized first" in (host.run(shape, [lane]).error or "")
    assert "has to be initialized first" in (host.run(PREFILL, [prompt_lane(row, 1)]).error or "")


def test_a_restored_row_needs_the_pages_that_it_had() -> None:
    host = host_of()
    row = at_second_window(host)
    save(host, row)
    host.prefill(host.admit(1, prompt_of(3, 1), pages=row.binding.pages[:1]))
    with pytest.raises(PageConflict, match=r"lost a page to .*slot=1.* and is restored"):
        host.run(RESTORE, [again(host, row)])


def test_a_window_is_left_for_the_next_with_its_operations_anew() -> None:
    host = host_of()
    row = at_second_window(host)
    save(host, row)
    host.serve(RESTORE, [(row, again(host, row))])
    assert "would pass 12 after 0 of 1" in (host.run(PREFILL, [prompt_lane(row, 1)]).error or "")
    host.serve(VISION, [(row, stage_lane(row))])
    host.prefill(row)
    assert len(row.tokens) == 1


def test_windows_within_a_restored_prefix_are_behind_the_row() -> None:
    host = host_of()
    row = host.admit(0, prompt_of(20, 0), windows=WINDOWS)
    host.serve(RESTORE, [(row, stage_lane(row, restored=10))])
    host.serve(PREFILL, [(row, prompt_lane(row, 2))])
    assert "would pass 12 after 0 of 1" in (host.run(PREFILL, [prompt_lane(row, 1)]).error or "")
    host.serve(VISION, [(row, stage_lane(row))])
    host.prefill(row)
    assert len(row.tokens) == 1


def test_the_pages_of_a_preempted_row_are_free() -> None:
    host = host_of()
    row = at(host, 5)
    save(host, row, shape=TERMINAL)
    other = host.admit(1, prompt_of(9, 1), pages=row.binding.pages)
    host.generate(other, 1)
    host.serve(RESUME, [(row, again(host, row, slot=2))])
    host.serve(DECODE[1], [(other, decode_lane(other))])
    host.prefill(row)


def test_a_chunk_ends_where_a_span_begins_or_ends() -> None:
    host = host_of()
    row = host.admit(0, prompt_of(20, 0), spans=((3, 9), (9, 12)))
    for chunk, good in ((4, False), (3, True), (5, False), (8, False), (6, True), (11, True)):
        lane = prompt_lane(row, chunk)
        if good:
            host.serve(PREFILL, [(row, lane)])
        else:
            assert "inside the span" in (host.run(PREFILL, [lane]).error or "")
    assert len(row.tokens) == 1


def test_tokens_have_no_place_in_a_state_operation() -> None:
    host = host_of()
    row = at(host, 5)
    lane = LaneInput(row.handle, 5, emits=False, tokens=np.array([], np.int32))
    assert "with tokens, drafts or a history" in (host.run(SNAPSHOT, [lane]).error or "")
    assert "asks for a state operation" in (host.run(PREFILL, [stage_lane(row, state_row=0)]).error or "")
