"""What a device with speculative graphs passes besides `DeviceConformance`.

Owns the checks of rounds that verify several targets. Does not own how many proposals are accepted, or by what rule.
Surprising rule: no check says how many tokens a round gives, since a device may accept none; all say which tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flare.graphs.frames import LaneResult, Sampling
from flare.machines.graph import GraphKind, GraphShape, rectangular
from flare.machines.request import EndReason
from tests.graphs.conformance import Conformance
from tests.graphs.host import CATALOG, GREEDY, Host, Row, banning, decode_lane, ok, prompt_lane, prompt_of

WIDE = {width: rectangular(GraphKind.SPECULATIVE, 2, width) for width in (1, 2, 4, 8)}
PACKED = GraphShape(GraphKind.SPECULATIVE, 4, width=4, draft_depth=3, packed_targets=8, drafts=True)
MIXED_WIDE = rectangular(GraphKind.MIXED, 3, 4, prefill_tokens=64, prompt_rows=1)


class RoundConformance(Conformance):
    """Subclass with `make`, as for `DeviceConformance`."""

    catalog = (*CATALOG, *WIDE.values(), PACKED, MIXED_WIDE)

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

    def test_a_lane_may_not_pass_the_width_or_the_limit(self, host: Host) -> None:
        row = host.admit(0, prompt_of(5, 111), output_limit=3)
        host.prefill(row)
        for width, shape in ((3, WIDE[2]), (0, WIDE[2]), (3, WIDE[4]), (2, WIDE[1])):
            assert host.run(shape, [replace(decode_lane(row), width=width)]).error is not None
        host.serve(WIDE[2], [(row, decode_lane(row, width=2))])
        finish(host, [row])
        assert len(row.tokens) == 3


def finish(host: Host, rows: list[Row]) -> None:
    """Decode what is left, row by row."""
    for row in rows:
        while row.ended is None:
            host.decode([row])
