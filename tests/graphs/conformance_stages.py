"""What a device with state operations passes besides `DeviceConformance`.

Owns the checks of initialize, restore, vision, snapshot, terminal snapshot and resume. Does not own what a refusal
says. Surprising rule: whatever is done to a row's state, its output is that of the same request served alone without
any of it.
"""

from __future__ import annotations

import pytest

from flare.graphs.frames import LaneInput, Sampling
from flare.machines.graph import STAGE_KINDS, GraphKind, GraphShape
from flare.machines.request import ImageWindow
from tests.graphs.conformance import Conformance
from tests.graphs.host import CATALOG, DECODE, PREFILL, Host, Row, decode_lane, prompt_lane, prompt_of, stage_lane

STAGE = {kind: GraphShape(kind, 2) for kind in sorted(STAGE_KINDS)}
INITIALIZE, RESTORE, RESUME = (STAGE[kind] for kind in (GraphKind.INITIALIZE, GraphKind.RESTORE, GraphKind.RESUME))
VISION, SNAPSHOT, TERMINAL = (
    STAGE[kind] for kind in (GraphKind.VISION, GraphKind.SNAPSHOT, GraphKind.TERMINAL_SNAPSHOT)
)
WINDOWS = (ImageWindow(8, 12, 2), ImageWindow(20, 30, 1), ImageWindow(30, 31, 3))
SAMPLED = Sampling(seed=9)


class StageConformance(Conformance):
    """Subclass with `make`, as for `DeviceConformance`: the device has at least two state rows as well."""

    catalog = (*CATALOG, *STAGE.values())

    def test_a_row_is_initialized_before_anything_else(self, host: Host) -> None:
        prompt = prompt_of(12, 200)
        alone = list(host.generate(host.admit(0, prompt), 3))
        row, other = host.admit(1, prompt, initialize=True), host.admit(2, prompt, initialize=True)
        refused(host, PREFILL, prompt_lane(row, 5))
        results = host.serve(INITIALIZE, [(row, stage_lane(row)), (other, stage_lane(other))])
        assert [(result.committed, result.tokens) for result in results] == [(0, ())] * 2
        refused(host, INITIALIZE, stage_lane(row))
        assert [host.generate(each, 3) for each in (row, other)] == [alone, alone]

    def test_a_row_that_needs_no_initialization_has_none(self, host: Host) -> None:
        refused(host, INITIALIZE, stage_lane(host.admit(0, prompt_of(5, 201))))

    @pytest.mark.parametrize("initialize", [False, True])
    def test_a_restored_prefix_counts_as_consumed(self, host: Host, initialize: bool) -> None:
        prompt = prompt_of(40, 202)
        alone = list(host.generate(host.admit(0, prompt, sampling=SAMPLED), 4))
        row = host.admit(1, prompt, sampling=SAMPLED, initialize=initialize)
        if initialize:
            refused(host, RESTORE, stage_lane(row, restored=25))
            host.serve(INITIALIZE, [(row, stage_lane(row))])
        (result,) = host.serve(RESTORE, [(row, stage_lane(row, restored=25))])
        assert (result.committed, result.tokens) == (25, ())
        refused(host, RESTORE, stage_lane(row, restored=25))
        assert host.generate(row, 4) == alone

    def test_a_prompt_goes_through_its_image_windows(self, host: Host) -> None:
        prompt = prompt_of(50, 203)
        alone = list(host.generate(host.admit(0, prompt), 4))
        row = host.admit(1, prompt, windows=WINDOWS)
        refused(host, PREFILL, prompt_lane(row, 9))
        for index, window in enumerate(WINDOWS):
            if index:
                self.move_window(host, row)
            if row.sent < window.start:
                host.serve(PREFILL, [(row, prompt_lane(row, window.start - row.sent))])
            refused(host, PREFILL, prompt_lane(row, 1))
            for operation in range(window.operations):
                refused(host, VISION, stage_lane(row, operation=operation + 1))
                (result,) = host.serve(VISION, [(row, stage_lane(row, operation=operation))])
                assert result.committed == row.sent
            refused(host, VISION, stage_lane(row, operation=window.operations))
            last = WINDOWS[index + 1].start if index + 1 < len(WINDOWS) else len(prompt)
            if index + 1 < len(WINDOWS):
                refused(host, PREFILL, prompt_lane(row, last - row.sent + 1))
            host.serve(PREFILL, [(row, prompt_lane(row, last - row.sent))])
        host.decode([row], 4)
        assert row.tokens == alone

    def move_window(self, host: Host, row: Row) -> None:
        """Save and restore a row that stands where its next window begins."""
        refused(host, RESTORE, stage_lane(row, state_row=1))
        host.serve(SNAPSHOT, [(row, stage_lane(row, state_row=1))])
        refused(host, PREFILL, prompt_lane(row, 1))
        refused(host, RESTORE, stage_lane(row, state_row=1))
        old = row.handle
        host.rebind(row)
        (result,) = host.serve(RESTORE, [(row, stage_lane(row, state_row=1))])
        assert (result.handle, result.committed) == (row.handle, row.sent)
        refused(host, PREFILL, LaneInput(old, row.sent, False, prompt_lane(row, 1).tokens, 0))

    def test_snapshots_on_the_way_change_nothing(self, host: Host) -> None:
        prompts = [prompt_of(30, 204), prompt_of(20, 205)]
        alone = [list(host.generate(host.admit(0, prompt), 4)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        for row in rows:
            host.serve(PREFILL, [(row, prompt_lane(row, 11))])
        results = host.serve(SNAPSHOT, [(row, stage_lane(row, state_row=i)) for i, row in enumerate(rows)])
        assert [result.committed for result in results] == [11, 11]
        for row in rows:
            host.prefill(row)
            host.serve(SNAPSHOT, [(row, stage_lane(row, state_row=0))])
            host.decode([row], 4)
        assert [row.tokens for row in rows] == alone

    @pytest.mark.parametrize("position", [0, 7, 20])
    def test_a_preempted_prompt_goes_on_elsewhere(self, host: Host, position: int) -> None:
        prompt = prompt_of(33, 206)
        alone = list(host.generate(host.admit(0, prompt, sampling=SAMPLED), 4))
        row = host.admit(1, prompt, sampling=SAMPLED)
        if position:
            host.serve(PREFILL, [(row, prompt_lane(row, position))])
        self.preempt(host, row, slot=3, state_row=0)
        assert host.generate(row, 4) == alone

    def test_a_preempted_stream_goes_on_elsewhere(self, host: Host) -> None:
        prompt = prompt_of(10, 207)
        alone = list(host.generate(host.admit(0, prompt), 7))
        row = host.admit(1, prompt)
        host.generate(row, 3)
        self.preempt(host, row, slot=2, state_row=1)
        host.decode([row], 2)
        self.preempt(host, row, slot=1, state_row=0)
        host.decode([row], 2)
        assert row.tokens == alone

    def preempt(self, host: Host, row: Row, slot: int, state_row: int) -> None:
        """Retire a row into a state row, let another request use its slot and pages, and resume it elsewhere."""
        committed, old = row.committed, row.handle
        host.serve(TERMINAL, [(row, stage_lane(row, state_row=state_row))])
        refused(host, DECODE[1], decode_lane(row))
        other = host.admit(old.slot, prompt_of(12, 208), pages=row.binding.pages)
        host.generate(other, 2)
        host.rebind(row, slot)
        (result,) = host.serve(RESUME, [(row, stage_lane(row, state_row=state_row))])
        assert (result.handle, result.committed, result.tokens) == (row.handle, committed, ())

    def test_a_saved_state_is_taken_once_and_by_its_own_request(self, host: Host) -> None:
        first, second = host.admit(0, prompt_of(9, 209)), host.admit(1, prompt_of(9, 210), sampling=SAMPLED)
        for index, row in enumerate((first, second)):
            host.generate(row, 1)
            host.serve(TERMINAL, [(row, stage_lane(row, state_row=index))])
            host.rebind(row, 2 + index)
        refused(host, RESUME, stage_lane(first, state_row=1))
        host.serve(RESUME, [(row, stage_lane(row, state_row=index)) for index, row in enumerate((first, second))])
        host.rebind(first, 0)
        refused(host, RESUME, stage_lane(first, state_row=0))

    @pytest.mark.parametrize("shape", [SNAPSHOT, TERMINAL])
    def test_a_retired_row_is_dead_until_its_slot_is_bound_anew(self, host: Host, shape: GraphShape) -> None:
        prompt = prompt_of(6, 211)
        ended, stopped = host.admit(0, prompt, output_limit=2), host.admit(1, prompt)
        for row in (ended, stopped):
            host.generate(row, 1)
        results = host.serve(shape, [(row, stage_lane(row)) for row in (ended, stopped)])
        assert [(result.committed, result.ended) for result in results] == [(8, None)] * 2
        for row in (ended, stopped):
            refused(host, shape, stage_lane(row))
            refused(host, DECODE[1], decode_lane(row))
        again = host.admit(0, prompt, output_limit=2)
        assert host.generate(again, 1) == ended.tokens

    def test_one_snapshot_frame_saves_and_retires(self, host: Host) -> None:
        prompt = prompt_of(21, 212)
        alone = list(host.generate(host.admit(0, prompt), 3))
        ended, row = host.admit(1, prompt, output_limit=1), host.admit(2, prompt)
        host.prefill(ended)
        host.serve(PREFILL, [(row, prompt_lane(row, 5))])
        host.serve(SNAPSHOT, [(ended, stage_lane(ended)), (row, stage_lane(row, state_row=0))])
        refused(host, TERMINAL, stage_lane(ended))
        assert host.generate(row, 3) == alone

    def test_a_bad_operation_leaves_no_trace(self, host: Host) -> None:
        prompt = prompt_of(16, 213)
        alone = list(host.generate(host.admit(0, prompt), 3))
        row, other = host.admit(1, prompt), host.admit(2, prompt)
        for each in (row, other):
            host.serve(PREFILL, [(each, prompt_lane(each, 5))])
        frames = {
            "one state row for two": (SNAPSHOT, [stage_lane(row, state_row=0), stage_lane(other, state_row=0)]),
            "a state row that is not there": (SNAPSHOT, [stage_lane(row, state_row=0), stage_lane(other, state_row=2)]),
            "retiring inside the prompt": (TERMINAL, [stage_lane(row, state_row=0), stage_lane(other)]),
            "a slot twice": (SNAPSHOT, [stage_lane(row, state_row=0), stage_lane(row, state_row=1)]),
            "images that nobody has": (VISION, [stage_lane(row)]),
            "an operation in a prefill": (PREFILL, [stage_lane(row, state_row=0)]),
            "a prompt in an operation": (SNAPSHOT, [prompt_lane(row, 5)]),
        }
        for name, (shape, lanes) in frames.items():
            assert host.run(shape, lanes).error is not None, name
        host.rebind(row)
        refused(host, RESUME, stage_lane(row, state_row=0))
        row.handle = type(row.handle)(1, row.handle.generation - 1)
        row.bound = True
        assert [host.generate(each, 3) for each in (row, other)] == [alone, alone]


def refused(host: Host, shape: GraphShape, *lanes: LaneInput) -> None:
    """The frame ends with an error."""
    assert host.run(shape, lanes).error is not None
