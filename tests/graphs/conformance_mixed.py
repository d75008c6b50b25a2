"""What a device with mixed graphs and packed prompts passes besides `DeviceConformance`.

Owns the checks of frames that several prompts, or prompts and decoding rows, share. Does not own the programs' own
comparison with a reference. Surprising rule: company never changes a row's tokens, so that each check compares rows
with the same requests served alone.
"""

from __future__ import annotations

import pytest

from flare.graphs.frames import LaneInput, Sampling
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import RequestHandle
from flare.machines.request import EndReason
from tests.graphs.conformance import Conformance
from tests.graphs.host import CATALOG, DECODE, GREEDY, Host, Row, decode_lane, ok, prompt_lane, prompt_of

MIXED = GraphShape(GraphKind.MIXED, 4, 64, prompt_rows=1)
MIXED_ROWS = GraphShape(GraphKind.MIXED, 4, 64, prompt_rows=2)
PACKED = GraphShape(GraphKind.PREFILL, 4, 64)
PACKED_SCORED = GraphShape(GraphKind.SCORED_PREFILL, 2, 64)


class MixedConformance(Conformance):
    """Subclass with `make`, as for `DeviceConformance`."""

    catalog = (*CATALOG, MIXED, MIXED_ROWS, PACKED, PACKED_SCORED)

    def test_a_prompt_beside_decoding_rows_changes_nobodys_tokens(self, host: Host) -> None:
        prompts = [prompt_of(length, 40 + length) for length in (3, 21, 30)]
        sampling = [GREEDY, Sampling(seed=3), GREEDY]
        alone = [list(host.generate(host.admit(0, prompts[i], sampling=sampling[i]), 6)) for i in range(3)]
        first, second, late = (host.admit(1 + i, prompts[i], sampling=sampling[i]) for i in range(3))
        for row in (first, second):
            host.prefill(row)
        for chunk in (7, 1, 20, 64):
            host.serve(MIXED, [(first, decode_lane(first)), _chunk(late, chunk), (second, decode_lane(second))])
        assert len(late.tokens) == 1
        host.decode([late, second, first], 2)
        host.decode([late], 3)
        assert [first.tokens, second.tokens, late.tokens] == [*alone[:2], alone[2][:6]]

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_the_prompt_may_have_any_place(self, host: Host, place: int) -> None:
        prompts = [prompt_of(5 + i, 50 + i) for i in range(3)]
        alone = [list(host.generate(host.admit(0, prompt), 1)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        for row in rows[1:]:
            host.prefill(row)
        lanes = [(row, decode_lane(row)) for row in rows[1:]]
        lanes.insert(place, _chunk(rows[0], 64))
        host.serve(MIXED, lanes)
        assert [row.tokens for row in rows] == [alone[0][:1], *alone[1:]]

    def test_a_mixed_graph_serves_prompts_or_decoding_rows_alone(self, host: Host) -> None:
        prompts = [prompt_of(40, 60), prompt_of(9, 61)]
        alone = [list(host.generate(host.admit(0, prompt), 4)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        for row in rows:
            host.serve(MIXED, [_chunk(row, 33)])
        host.serve(MIXED, [_chunk(rows[0], 33)])
        for _ in range(4):
            host.serve(MIXED, [(row, decode_lane(row)) for row in rows])
        assert [row.tokens for row in rows] == alone

    def test_prompts_share_a_capacity(self, host: Host) -> None:
        lengths = (30, 5, 1, 28)
        prompts = [prompt_of(length, 70 + length) for length in lengths]
        alone = [list(host.generate(host.admit(0, prompt), 3)) for prompt in prompts]
        rows = [host.admit(i, prompt) for i, prompt in enumerate(prompts)]
        results = host.serve(PACKED, [_chunk(row, 64) for row in rows])
        assert [result.committed for result in results] == [length + 1 for length in lengths]
        host.decode(rows, 3)
        assert [row.tokens for row in rows] == alone

    def test_packed_chunks_go_on_where_they_stopped(self, host: Host) -> None:
        prompts = [prompt_of(50, 80), prompt_of(37, 81), prompt_of(20, 82)]
        alone = [list(host.generate(host.admit(0, prompt), 2)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        host.serve(PACKED, [_chunk(rows[0], 40), _chunk(rows[1], 24)])
        host.serve(MIXED_ROWS, [_chunk(rows[1], 30), _chunk(rows[2], 19)])
        host.serve(MIXED_ROWS, [_chunk(rows[2], 1), (rows[1], decode_lane(rows[1])), _chunk(rows[0], 10)])
        for _ in range(2):
            host.serve(MIXED, [(row, decode_lane(row)) for row in rows])
        assert [row.tokens[:3] for row in rows] == alone

    def test_packed_scored_prompts_have_their_own_scores(self, host: Host) -> None:
        prompts = [prompt_of(33, 90), prompt_of(12, 91)]
        alone = []
        for prompt in prompts:
            (result,) = host.prefill(host.admit(0, prompt, prompt_logprobs=1), shape=PACKED_SCORED)
            alone.append(result)
        rows = [host.admit(1 + i, prompt, prompt_logprobs=1) for i, prompt in enumerate(prompts)]
        together = host.serve(PACKED_SCORED, [_chunk(row, 64) for row in rows])
        for one, other in zip(together, alone, strict=True):
            assert one.tokens == other.tokens
            assert one.prompt_scores is not None and other.prompt_scores is not None
            expected = [score.logprob for score in other.prompt_scores]
            assert [score.logprob for score in one.prompt_scores] == pytest.approx(expected, abs=1e-3)

    def test_an_ended_row_in_a_mixed_frame_changes_nothing(self, host: Host) -> None:
        prompt = prompt_of(20, 92)
        alone = list(host.generate(host.admit(0, prompt), 1))
        ended = host.admit(1, prompt_of(6, 93), output_limit=1)
        host.prefill(ended)
        assert ended.ended is EndReason.LENGTH
        late = host.admit(2, prompt)
        (gone, _) = host.serve(MIXED, [(ended, decode_lane(ended)), _chunk(late, 64)])
        assert (gone.committed, gone.tokens, gone.ended) == (7, (), None)
        host.decode([late])
        assert late.tokens == alone

    def test_a_bad_mixed_frame_leaves_no_trace(self, host: Host) -> None:
        prompts = [prompt_of(length, 94 + length) for length in (9, 40, 40)]
        alone = [list(host.generate(host.admit(0, prompt), 2)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        host.prefill(rows[0])
        host.serve(MIXED, [_chunk(rows[1], 10), (rows[0], decode_lane(rows[0]))])
        decode, unbound = decode_lane(rows[0]), LaneInput(RequestHandle(3, 99), 3, emits=True)
        frames = {
            "two prompts": (MIXED, [prompt_lane(rows[1], 5), prompt_lane(rows[2], 5), decode]),
            "more tokens than it takes": (MIXED_ROWS, [prompt_lane(rows[1], 30), prompt_lane(rows[2], 40), decode]),
            "decoding inside the prompt": (MIXED, [decode, decode_lane(rows[1])]),
            "a row that is not there": (MIXED, [decode, prompt_lane(rows[1], 5), unbound]),
            "two targets": (MIXED, [decode_lane(rows[0], width=2), prompt_lane(rows[1], 5)]),
            "a decoding row in a prefill": (PACKED, [decode, prompt_lane(rows[1], 5)]),
            "a prompt in a decode": (DECODE[2], [decode, prompt_lane(rows[1], 5)]),
        }
        for name, (shape, lanes) in frames.items():
            assert host.run(shape, lanes).error is not None, name
        host.serve(MIXED_ROWS, [_chunk(rows[2], 30), (rows[0], decode_lane(rows[0])), _chunk(rows[1], 30)])
        host.serve(MIXED, [(rows[1], decode_lane(rows[1])), _chunk(rows[2], 10)])
        host.decode(rows[1:], 1)
        host.decode(rows[2:], 1)
        assert [row.tokens for row in rows] == alone

    def test_a_mixed_frame_is_followed_by_queued_decoding(self, host: Host) -> None:
        prompts = [prompt_of(8, 98), prompt_of(60, 99)]
        alone = [list(host.generate(host.admit(0, prompt), 3)) for prompt in prompts]
        rows = [host.admit(1 + i, prompt) for i, prompt in enumerate(prompts)]
        host.prefill(rows[0])
        host.serve(MIXED, [(rows[0], decode_lane(rows[0])), _chunk(rows[1], 60)])
        fences = [host.submit(DECODE[2], [decode_lane(row, ahead) for row in rows]) for ahead in (0, 1)]
        for fence in fences:
            completion = host.wait()
            assert completion.fence == fence
            for row, result in zip(rows, ok(completion), strict=True):
                row.take(result)
        assert [rows[0].tokens, rows[1].tokens] == [alone[0], alone[1][:3]]


def _chunk(row: Row, tokens: int) -> tuple[Row, LaneInput]:
    return row, prompt_lane(row, tokens)
