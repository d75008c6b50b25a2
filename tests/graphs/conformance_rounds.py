"""What a device with speculative graphs passes besides `DeviceConformance`, and one whose programs tell confidence.

Owns the checks of rounds that verify several targets. Does not own how many of a program's own proposals are accepted,
or by what rule. Surprising rule: but for copies, no check says how many tokens a round gives, since a device may accept
none; all say which tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from flare.graphs.frames import LaneResult, Sampling
from flare.machines.allocation import allocate
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.request import EndReason
from tests.graphs.conformance import Conformance
from tests.graphs.host import CATALOG, GREEDY, Host, Row, banning, decode_lane, ok, prompt_lane, prompt_of

WIDE = {width: rectangular(GraphKind.SPECULATIVE, 2, width) for width in (1, 2, 4, 8)}
PACKED = GraphShape(GraphKind.SPECULATIVE, 4, width=4, draft_depth=3, packed_targets=8, drafts=True)
COPIES = rectangular(GraphKind.SPECULATIVE, 2, 4, source=Source.COPY)
MIXED_WIDE = rectangular(GraphKind.MIXED, 3, 4, prefill_tokens=64, prompt_rows=1)


class RoundConformance(Conformance):
    """Subclass with `make`, as for `DeviceConformance`."""

    catalog = (*CATALOG, *WIDE.values(), PACKED, COPIES, MIXED_WIDE)

    @pytest.mark.parametrize("width", WIDE)
    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=5)], ids=["greedy", "sampled"])
    def test_no_width_changes_the_output(self, host: Host, width: int, sampling: Sampling) -> None:
        prompt = prompt_of(13, 100)
        alone = list(host.generate(host.admit(0, prompt, sampling=sampling, output_limit=24), 23))
        row = host.admit(1, prompt, sampling=sampling, output_limit=24)
        host.prefill(row)
        while row.ended is None:
            before = len(row.tokens)
            (result,) = host.serve(WIDE[width], [(row, decode_lane(row, width=width))])
            assert 1 <= len(result.tokens) <= width
            assert result.committed == 13 + before + len(result.tokens)
            assert result.verified == min(width, 24 - before)
        assert row.tokens == alone
        assert row.ended is EndReason.LENGTH

    def test_widths_and_kinds_may_change_from_round_to_round(self, host: Host) -> None:
        prompts = [prompt_of(9, 101), prompt_of(17, 102)]
        alone = [list(host.generate(host.admit(0, prompt, output_limit=30), 29)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt, output_limit=30) for i, prompt in enumerate(prompts)]
        for row in rows:
            host.prefill(row)
        widths = itertools.cycle([2, 1, 8, None, 4])
        while live := [row for row in rows if row.ended is None]:
            width = next(widths)
            if width is None:
                host.decode(live)
            else:
                targets = {rows[0].handle: width, rows[1].handle: width - width // 2}
                host.serve(WIDE[width], [(row, decode_lane(row, width=targets[row.handle])) for row in live])
        assert [row.tokens for row in rows] == alone

    def test_a_stop_token_ends_the_row_within_a_round(self, host: Host) -> None:
        sampling = Sampling(temperature=0.0, logit_bias=((42, 100.0),))
        row = host.admit(0, prompt_of(6, 103), sampling=sampling, stop_tokens=(42,), output_limit=20)
        host.prefill(row, history=banning(42))
        host.serve(WIDE[8], [(row, decode_lane(row, width=8))])
        assert row.tokens[1:] == [42]
        assert (row.ended, row.committed) == (EndReason.STOP, 8)
        assert ok(host.run(WIDE[8], [decode_lane(row, width=8)])) == (LaneResult(row.handle, committed=8),)

    def test_a_queued_round_continues_the_one_before(self, host: Host) -> None:
        prompt = prompt_of(9, 104)
        alone = list(host.generate(host.admit(0, prompt, output_limit=40), 39))
        row = host.admit(1, prompt, output_limit=40)
        host.prefill(row)
        for _ in range(4):
            fences = [host.submit(WIDE[4], [decode_lane(row, ahead, 4)]) for ahead in (0, 4)]
            for fence in fences:
                completion = host.wait()
                assert completion.fence == fence
                row.take(ok(completion)[0])
        assert len(row.tokens) >= 9
        assert row.tokens == alone[: len(row.tokens)]

    def test_rows_of_different_widths_share_packed_targets(self, host: Host) -> None:
        prompts = [prompt_of(4 + i, 105 + i) for i in range(3)]
        alone = [list(host.generate(host.admit(0, prompt, output_limit=9), 8)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt, output_limit=9) for i, prompt in enumerate(prompts)]
        for row in rows:
            host.prefill(row)
        too_many = [decode_lane(row, width=3) for row in rows]
        assert host.run(PACKED, too_many).error is not None
        while live := [row for row in rows if row.ended is None]:
            host.serve(PACKED, [(row, decode_lane(row, width=4 - rows.index(row))) for row in live[:2]])
        assert [row.tokens for row in rows] == alone

    def test_a_round_shares_a_frame_with_a_prompt(self, host: Host) -> None:
        prompts = [prompt_of(7, 108), prompt_of(11, 109), prompt_of(50, 110)]
        alone = [list(host.generate(host.admit(0, prompt, output_limit=12), 11)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt, output_limit=12) for i, prompt in enumerate(prompts)]
        for row in rows[:2]:
            host.prefill(row)
        late = rows[2]
        while late.sent < 50:
            lanes = [(row, decode_lane(row, width=4)) for row in rows[:2] if row.ended is None]
            host.serve(MIXED_WIDE, [(late, prompt_lane(late, 20)), *lanes])
        finish(host, rows)
        assert [row.tokens for row in rows] == alone

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=6)], ids=["greedy", "sampled"])
    def test_copies_are_accepted_as_far_as_they_are_what_is_drawn(self, host: Host, sampling: Sampling) -> None:
        prompt = prompt_of(9, 112)
        alone = list(host.generate(host.admit(0, prompt, sampling=sampling, output_limit=13), 12))
        row = host.admit(1, prompt, sampling=sampling, output_limit=13)
        host.prefill(row)
        for right in (3, 0, 1, 2):
            before = len(row.tokens)
            given = [alone[before + place] if place < right else other(alone[before + place]) for place in range(3)]
            lane = replace(decode_lane(row, width=4), proposals=np.array(given, np.int32))
            (result,) = host.serve(COPIES, [(row, lane)])
            assert (len(result.tokens), result.verified) == (min(right + 1, 13 - before), 4)
        assert row.tokens == alone[: len(row.tokens)]

    def test_copies_go_to_programs_of_copies_alone(self, host: Host) -> None:
        row = host.admit(0, prompt_of(5, 113))
        host.prefill(row)
        lane = replace(decode_lane(row, width=4), proposals=np.array([1, 2, 3], np.int32))
        for wrong, shape in (
            (lane, WIDE[4]),
            (replace(lane, proposals=None), COPIES),
            (replace(lane, proposals=lane.proposals[:2] if lane.proposals is not None else None), COPIES),
        ):
            assert host.run(shape, [wrong]).error is not None
        host.serve(COPIES, [(row, lane)])

    def test_a_lane_may_not_pass_the_width_or_the_limit(self, host: Host) -> None:
        row = host.admit(0, prompt_of(5, 111), output_limit=3)
        host.prefill(row)
        for width, shape in ((3, WIDE[2]), (0, WIDE[2]), (3, WIDE[4]), (2, WIDE[1])):
            assert host.run(shape, [replace(decode_lane(row), width=width)]).error is not None
        host.serve(WIDE[2], [(row, decode_lane(row, width=2))])
        finish(host, [row])
        assert len(row.tokens) == 3


class SharingConformance(Conformance):
    """For a device whose programs tell confidence and share out their target rows; subclass with `make`."""

    catalog = (*CATALOG, PACKED, COPIES, WIDE[1], WIDE[4])

    def test_every_program_that_proposes_tells_confidence(self, host: Host) -> None:
        row = host.admit(1, prompt_of(7, 114), output_limit=30)
        host.prefill(row)
        for shape in (WIDE[4], PACKED):
            completion = host.run(shape, [decode_lane(row, width=3)])
            row.take(ok(completion)[0])
            assert completion.confidence is not None and completion.confidence.dtype == np.float32
            conditional, joint = completion.confidence[:, 1, :3]
            assert ((conditional >= 0) & (conditional <= 1)).all()
            assert joint == pytest.approx(np.cumprod(conditional), rel=1e-5)

    def test_rows_are_shared_out_by_joint_confidence_below_the_ceilings(self, host: Host) -> None:
        prompts = [prompt_of(6 + i, 115 + i) for i in range(4)]
        alone = [list(host.generate(host.admit(i, prompt, output_limit=16), 15)) for i, prompt in enumerate(prompts)]
        rows = [host.admit(i, prompt, output_limit=16) for i, prompt in enumerate(prompts)]
        for row in rows:
            host.prefill(row)
        ceilings = (4, 2, 4, 3)
        while live := [row for row in rows if row.ended is None]:
            lanes = [decode_lane(row, width=ceilings[rows.index(row)]) for row in live]
            completion = host.run(PACKED, lanes, allocates=True)
            results, sidecar = ok(completion), completion.confidence
            assert sidecar is not None
            joint = [sidecar[1, row.handle.slot, :3].tolist() for row in live]
            widths = [lane.width for lane in lanes]
            assert [result.verified for result in results] == allocate(joint, widths, PACKED.packed_targets)
            for row, result in zip(live, results, strict=True):
                row.take(result)
        assert [row.tokens for row in rows] == alone


def other(token: int) -> int:
    """A token that is not this one."""
    return (token + 1) % 100


def finish(host: Host, rows: list[Row]) -> None:
    """Decode what is left, row by row."""
    for row in rows:
        while row.ended is None:
            host.decode([row])
