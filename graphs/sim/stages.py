"""State operations on the simulated device: what each does to a row and to the state rows, and when it may not.

Owns the state rows. Does not own rows, generations or pages (`rows`), which it is shown. Surprising rule: nobody says
whose state is in a state row; the device remembers the generation that put it there. A restore must replace exactly
that generation, and a resume must bring the binding that it had, pages apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from flare.machines.graph import GraphKind

from ..frames import LaneInput, LaneResult, StageInput
from .prompts import check_span
from .state import FrameRefused, PageConflict, Progress, Row, Saved, Setup
from .tokens import hash_tokens


class Change(NamedTuple):
    """What an operation does once the whole frame is known to be good: the row's new state, whether the row is dead
    from then on, and what the state row that it names holds afterwards."""

    progress: Progress
    setup: Setup
    retires: bool = False
    state: tuple[int, Saved | None] | None = None

    def result(self, lane: LaneInput) -> LaneResult:
        """What the host is told: nothing was drawn, and how many tokens the row's state stands for."""
        return LaneResult(lane.handle, self.progress.committed)


Operation = Callable[[LaneInput, StageInput, Row, Row | None], Change]
"""(lane, what it asks for, its row, the row that stood in its slot before the frame) -> what is to be done."""


class Stages:
    """State operations over `state_rows` state rows."""

    def __init__(self, state_rows: int) -> None:
        self._saved: list[Saved | None] = [None] * state_rows
        self._operations: Mapping[GraphKind, Operation] = {
            GraphKind.INITIALIZE: self._initialize,
            GraphKind.VISION: self._encode_images,
            GraphKind.SNAPSHOT: self._snapshot,
            GraphKind.TERMINAL_SNAPSHOT: self._retire,
            GraphKind.RESTORE: self._restore,
            GraphKind.RESUME: self._resume,
        }

    def step(self, kind: GraphKind, lane: LaneInput, row: Row, standing: Row | None) -> Change:
        """Work out one lane; nothing changes. Raises `FrameRefused`, or `PageConflict` for a state whose pages are
        another's by now."""
        if lane.emits or lane.width != 1 or lane.tokens is not None or lane.history is not None:
            raise FrameRefused(f"{kind} of {lane.handle} with tokens, drafts or a history")
        return self._operations[kind](lane, lane.stage or StageInput(), row, standing)

    def apply(self, row: Row, change: Change) -> None:
        """Do what was worked out."""
        row.progress, row.setup, row.retired = change.progress, change.setup, change.retires
        if change.state is not None:
            index, saved = change.state
            self._saved[index] = saved

    def _initialize(self, lane: LaneInput, _stage: StageInput, row: Row, _standing: Row | None) -> Change:
        _stands_at(lane, row.progress.consumed)
        if row.setup.initialized:
            raise FrameRefused(f"{row.handle} has been initialized, or need not be")
        return Change(row.progress, row.setup._replace(initialized=True))

    def _encode_images(self, lane: LaneInput, stage: StageInput, row: Row, _standing: Row | None) -> Change:
        row.check_initialized()
        _stands_at(lane, row.progress.consumed)
        windows, setup = row.binding.windows, row.setup
        if setup.window >= len(windows):
            raise FrameRefused(f"{row.handle} has no images to encode")
        operations = windows[setup.window].operations
        if stage.operation != setup.operations or stage.operation >= operations:
            done = f"{setup.operations} of {operations} are done"
            raise FrameRefused(f"{row.handle}: image operation {stage.operation} in window {setup.window}; {done}")
        return Change(row.progress, setup._replace(operations=setup.operations + 1))

    def _snapshot(self, lane: LaneInput, stage: StageInput, row: Row, standing: Row | None) -> Change:
        if stage.state_row is None or stage.retires:
            return self._retire(lane, stage, row, standing)
        return self._save(lane, stage.state_row, row, moved=False)

    def _retire(self, lane: LaneInput, stage: StageInput, row: Row, _standing: Row | None) -> Change:
        if stage.state_row is not None:
            return self._save(lane, stage.state_row, row, moved=True)
        _stands_at(lane, row.progress.consumed)
        # What ends a row on the host, such as a stop string, is not seen here; but no row ends inside its prompt.
        if not row.progress.prompt_done:
            raise FrameRefused(f"{row.handle} would retire inside its prompt, at {row.progress.consumed}")
        return Change(row.progress, row.setup, retires=True)

    def _save(self, lane: LaneInput, index: int, row: Row, *, moved: bool) -> Change:
        row.check_initialized()
        _stands_at(lane, row.progress.consumed)
        if row.progress.ended is not None:
            raise FrameRefused(f"{row.handle} has ended; there is nothing to go on with from a saved state")
        self._check_index(index)
        saved = Saved(row.handle, row.binding, row.progress, row.setup, moved)
        return Change(row.progress, row.setup, retires=moved, state=(index, saved))

    def _restore(self, lane: LaneInput, stage: StageInput, row: Row, standing: Row | None) -> Change:
        if stage.state_row is None:
            return self._restore_prefix(lane, stage, row)
        saved = self._state(stage.state_row)
        if lane.binding is None or standing is None or standing.handle != saved.handle:
            raise FrameRefused(f"{row.handle} cannot restore state row {stage.state_row}, which is of {saved.handle}")
        if (saved.progress, saved.setup, False) != (standing.progress, standing.setup, saved.moved or standing.retired):
            raise FrameRefused(f"{saved.handle} has gone on since state row {stage.state_row} was saved")
        if standing.robbed_by is not None:
            raise PageConflict(f"{saved.handle} lost a page to {standing.robbed_by} and is restored")
        if lane.binding != saved.binding:
            raise FrameRefused(f"{row.handle} is bound otherwise than {saved.handle}, whose state it restores")
        position = saved.progress.consumed
        _stands_at(lane, position)
        windows, following = saved.binding.windows, saved.setup.window + 1
        if following >= len(windows) or windows[following].start != position:
            raise FrameRefused(f"{row.handle}: no further image window begins at {position}")
        return Change(saved.progress, Setup(True, following), state=(stage.state_row, None))

    def _restore_prefix(self, lane: LaneInput, stage: StageInput, row: Row) -> Change:
        row.check_initialized()
        tokens = stage.tokens
        if tokens is None or len(tokens) == 0:
            raise FrameRefused(f"{row.handle} restores neither a state row nor a prefix")
        if row.progress != Progress():
            raise FrameRefused(f"{row.handle} restores a prefix, but stands at {row.progress.committed}")
        _stands_at(lane, 0)
        end = len(tokens)
        row.check_room(end)
        check_span(row, end)
        behind = sum(window.end <= end for window in row.binding.windows)
        return Change(Progress(end, hash_tokens(tokens, 0)), row.setup._replace(window=behind))

    def _resume(self, lane: LaneInput, stage: StageInput, row: Row, _standing: Row | None) -> Change:
        if stage.state_row is None or lane.binding is None:
            raise FrameRefused(f"{row.handle} resumes without a state row or a fresh generation")
        saved = self._state(stage.state_row)
        if not saved.moved:
            raise FrameRefused(f"{row.handle} resumes {saved.handle}, which was not retired")
        if replace(lane.binding, pages=saved.binding.pages) != saved.binding:
            raise FrameRefused(f"{row.handle} is bound otherwise than {saved.handle}, whose state it resumes")
        _stands_at(lane, saved.progress.consumed)
        row.check_room(saved.progress.committed)
        return Change(saved.progress, saved.setup, state=(stage.state_row, None))

    def _state(self, index: int) -> Saved:
        self._check_index(index)
        saved = self._saved[index]
        if saved is None:
            raise FrameRefused(f"state row {index} is empty")
        return saved

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._saved):
            raise FrameRefused(f"state row {index} of {len(self._saved)}")


def _stands_at(lane: LaneInput, position: int) -> None:
    """The host and the device agree on where the row's prompt stands."""
    if lane.start != position:
        raise FrameRefused(f"{lane.handle} is taken to stand at {lane.start}, but its state is that of {position}")
