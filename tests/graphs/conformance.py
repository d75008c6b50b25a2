"""One suite that every device passes. A device joins by subclassing `DeviceConformance` with its `make`.

Owns the checks of graphs/device.py and graphs/frames.py that hold whatever the model, for the kinds that every device
has; other `conformance_*` modules add the rest. Does not compare tokens between devices. Surprising rule: requests are
compared with themselves, so a device that draws wrong but consistent tokens passes; the programs' own tests compare
with a reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from flare.graphs.device import Device, DeviceLost
from flare.graphs.frames import LaneInput, LaneResult, Sampling
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.ids import RequestHandle
from flare.machines.request import EndReason
from tests.graphs.host import CATALOG, DECODE, GREEDY, SCORED, Host, banning, decode_lane, ok, prompt_of


class Conformance:
    """Subclass with `make`: a new device of at least 4 slots and 24 pages, not yet prepared."""

    make: ClassVar[Callable[[], Device]]
    catalog: ClassVar[tuple[GraphShape, ...]] = CATALOG

    @pytest.fixture
    def host(self) -> Iterator[Host]:
        """A prepared and started device with its driver."""
        device = type(self).make()
        try:
            yield Host(device, type(self).catalog)
        finally:
            device.close()


class DeviceConformance(Conformance):
    """What every device does, with prefill, scored prefill and decode graphs."""

    def test_prefill_emits_the_first_token(self, host: Host) -> None:
        row = host.admit(0, prompt_of(10, 1))
        (result,) = host.prefill(row)
        assert result.committed == 11
        assert len(result.tokens) == 1
        assert result.ended is None
        assert result.scores is None
        assert result.prompt_scores is None

    def test_each_decode_commits_one_token(self, host: Host) -> None:
        row = host.admit(0, prompt_of(5, 2))
        host.prefill(row)
        for step in range(1, 5):
            host.decode([row])
            assert len(row.tokens) == 1 + step
            assert row.committed == 5 + 1 + step

    def test_a_batch_changes_no_tokens(self, host: Host) -> None:
        prompts = [prompt_of(length, length) for length in (3, 17, 40)]
        sampling = [GREEDY, Sampling(seed=7), Sampling(temperature=0.7, seed=8)]
        rows = [host.admit(slot, prompts[slot], sampling=sampling[slot]) for slot in range(3)]
        alone = [list(host.generate(row, 5)) for row in rows]
        again = [host.admit(3 - index, prompts[index], sampling=sampling[index]) for index in range(3)]
        for row in again:
            host.prefill(row)
        host.decode(again[::-1], 5)
        assert [row.tokens for row in again] == alone

    @pytest.mark.parametrize("chunk", [1, 7, 32])
    def test_chunked_prefill_equals_whole_prefill(self, host: Host, chunk: int) -> None:
        prompt = prompt_of(33, 3)
        whole = list(host.generate(host.admit(0, prompt), 4))
        row = host.admit(1, prompt)
        results = host.prefill(row, chunk=chunk)
        host.decode([row], 4)
        assert row.tokens == whole
        assert [result.committed for result in results[:-1]] == list(range(chunk, 33, chunk))
        assert all(result.tokens == () for result in results[:-1])

    def test_a_queued_decode_continues_the_one_before(self, host: Host) -> None:
        prompt = prompt_of(9, 4)
        serial = list(host.generate(host.admit(0, prompt), 6))
        row = host.admit(1, prompt)
        host.prefill(row)
        for _ in range(3):
            lanes = [[decode_lane(row)], [decode_lane(row, ahead=1)]]
            fences = [host.submit(DECODE[1], lane) for lane in lanes]
            for fence in fences:
                completion = host.wait()
                assert completion.fence == fence
                row.take(ok(completion)[0])
        assert row.tokens == serial

    def test_a_row_ends_by_length_and_then_changes_nothing(self, host: Host) -> None:
        row = host.admit(0, prompt_of(6, 5), output_limit=3, logprobs=1)
        host.prefill(row)
        host.decode([row])
        assert row.ended is None
        fences = [host.submit(DECODE[1], [decode_lane(row, ahead)]) for ahead in (0, 1)]
        last, queued = host.wait(), host.wait()
        assert [last.fence, queued.fence] == fences
        assert ok(last)[0].ended is EndReason.LENGTH
        assert ok(last)[0].committed == 9
        assert ok(queued) == (LaneResult(row.handle, committed=9),)

    def test_a_row_may_end_with_its_first_token(self, host: Host) -> None:
        row = host.admit(0, prompt_of(6, 6), output_limit=1)
        host.prefill(row)
        assert len(row.tokens) == 1
        assert row.ended is EndReason.LENGTH

    def test_an_ended_row_does_not_disturb_its_neighbour(self, host: Host) -> None:
        prompt = prompt_of(12, 7)
        alone = list(host.generate(host.admit(0, prompt), 6))
        rows = [host.admit(1, prompt), host.admit(2, prompt_of(5, 8), output_limit=2)]
        for row in rows:
            host.prefill(row)
        host.decode(rows, 6)
        assert rows[0].tokens == alone
        assert len(rows[1].tokens) == 2

    def test_a_stop_token_ends_the_row_and_is_returned(self, host: Host) -> None:
        sampling = Sampling(temperature=0.0, logit_bias=((42, 100.0),))
        row = host.admit(0, prompt_of(6, 9), sampling=sampling, stop_tokens=(41, 42))
        host.prefill(row, history=banning(42))
        assert row.tokens != [42]
        assert row.ended is None
        fences = [host.submit(DECODE[1], [decode_lane(row, ahead)]) for ahead in (0, 1)]
        last, queued = host.wait(), host.wait()
        assert [last.fence, queued.fence] == fences
        assert ok(last)[0].tokens == (42,)
        assert ok(last)[0].ended is EndReason.STOP
        assert ok(last)[0].committed == 8
        assert ok(queued) == (LaneResult(row.handle, committed=8),)

    def test_a_stop_token_wins_over_the_length(self, host: Host) -> None:
        sampling = Sampling(temperature=0.0, logit_bias=((42, 100.0),))
        row = host.admit(0, prompt_of(6, 10), sampling=sampling, stop_tokens=(42,), output_limit=1)
        host.prefill(row)
        assert row.tokens == [42]
        assert row.ended is EndReason.STOP

    def test_a_bias_of_minus_100_forbids_a_token(self, host: Host) -> None:
        prompt = prompt_of(6, 11)
        (likeliest,) = host.generate(host.admit(0, prompt), 0)
        sampling = Sampling(temperature=0.0, logit_bias=((likeliest, -100.0),))
        assert likeliest not in host.generate(host.admit(1, prompt, sampling=sampling), 5)

    def test_banned_tokens_are_not_drawn(self, host: Host) -> None:
        prompt = prompt_of(6, 12)
        tokens = list(host.generate(host.admit(0, prompt), 1))
        row = host.admit(1, prompt)
        host.prefill(row, history=banning(*tokens))
        assert row.tokens[0] not in tokens
        banned = row.tokens[0]
        lane = LaneInput(row.handle, row.committed - 1, emits=True, history=banning(banned))
        row.take(ok(host.run(DECODE[1], [lane]))[0])
        assert row.tokens[1] != banned

    def test_the_seed_decides_unless_greedy(self, host: Host) -> None:
        prompt = prompt_of(10, 13)
        cases = [Sampling(seed=1), Sampling(seed=1), Sampling(seed=2)]
        first, same, other = (
            list(host.generate(host.admit(slot, prompt, sampling=sampling), 7)) for slot, sampling in enumerate(cases)
        )
        assert first == same
        assert first != other
        greedy = [Sampling(temperature=0.0, seed=seed) for seed in (1, 2)]
        one, two = (list(host.generate(host.admit(3, prompt, sampling=sampling), 7)) for sampling in greedy)
        assert one == two

    def test_a_slot_is_used_again_by_a_new_generation(self, host: Host) -> None:
        prompt = prompt_of(8, 14)
        fresh = list(host.generate(host.admit(0, prompt), 4))
        old = host.admit(1, prompt_of(20, 15))
        host.generate(old, 2)
        new = host.admit(1, prompt)
        host.prefill(new)
        stale = host.run(DECODE[1], [decode_lane(old)])
        assert stale.error is not None
        host.decode([new], 4)
        assert new.tokens == fresh

    def test_pages_are_used_again_in_any_order(self, host: Host) -> None:
        prompt = prompt_of(60, 16)
        whole = host.admit(0, prompt)
        tokens = list(host.generate(whole, 7))
        pages = whole.binding.pages
        again = host.admit(1, prompt_of(50, 17), pages=pages)
        host.generate(again, 3)
        backwards = host.admit(2, prompt, pages=pages[::-1])
        assert host.generate(backwards, 7) == tokens

    def test_completions_come_once_each_in_order_from_another_thread(self, host: Host) -> None:
        row = host.admit(0, prompt_of(4, 18), output_limit=100)
        host.prefill(row)
        fences = [host.submit(DECODE[1], [decode_lane(row)])]
        for _ in range(20):
            fences.append(host.submit(DECODE[1], [decode_lane(row, 1)]))
            completion = host.wait()
            assert completion.fence == fences[-2]
            row.take(ok(completion)[0])
        assert host.wait().fence == fences[-1]
        host.device.close()
        assert host.completions.empty()
        assert threading.get_ident() not in host.callback_threads
        assert len(host.callback_threads) == 1

    def test_frames_in_flight_keep_to_their_own_rows(self, host: Host) -> None:
        prompts = [prompt_of(length, 60 + length) for length in (5, 12)]
        alone = [list(host.generate(host.admit(0, prompt), 6)) for prompt in prompts]
        rows = [host.admit(1 + index, prompt) for index, prompt in enumerate(prompts)]
        for row in rows:
            host.prefill(row)
        for _ in range(6):
            for row in rows:
                host.submit(DECODE[1], [decode_lane(row)])
            for row in rows:
                row.take(ok(host.wait())[0])
        assert [row.tokens for row in rows] == alone

    def test_close_delivers_what_is_in_flight(self, host: Host) -> None:
        row = host.admit(0, prompt_of(4, 19))
        host.prefill(row)
        fences = [host.submit(DECODE[1], [decode_lane(row, ahead)]) for ahead in (0, 1)]
        host.device.close()
        delivered = [host.completions.get_nowait() for _ in fences]
        assert [completion.fence for completion in delivered] == fences
        assert all(completion.error is None for completion in delivered)
        host.device.close()
        assert host.completions.empty()

    def test_submit_after_close_is_refused(self, host: Host) -> None:
        row = host.admit(0, prompt_of(4, 20))
        host.prefill(row)
        host.device.close()
        with pytest.raises(DeviceLost):
            host.submit(DECODE[1], [decode_lane(row)])

    def test_a_bad_frame_fails_alone(self, host: Host) -> None:
        prompt = prompt_of(11, 21)
        tokens = list(host.generate(host.admit(0, prompt), 4))
        row = host.admit(1, prompt)
        host.prefill(row)
        unbound = LaneInput(RequestHandle(2, 99), 3, emits=True)
        assert host.run(DECODE[1], [unbound]).error is not None
        assert host.run(GraphShape(GraphKind.DECODE, 3), [decode_lane(row)]).error is not None
        fences = [host.submit(DECODE[2], [unbound]), host.submit(DECODE[1], [decode_lane(row)])]
        bad, good = host.wait(), host.wait()
        assert [bad.fence, good.fence] == fences
        assert bad.error is not None
        row.take(ok(good)[0])
        host.decode([row], 3)
        assert row.tokens == tokens

    def test_scores_come_when_asked_for(self, host: Host) -> None:
        prompt = prompt_of(6, 22)
        for slot, logprobs in enumerate((0, 3)):
            row = host.admit(slot, prompt, logprobs=logprobs)
            (first,) = host.prefill(row)
            (second,) = ok(host.run(DECODE[1], [decode_lane(row)]))
            for result in (first, second):
                assert result.scores is not None
                (score,) = result.scores
                assert score.logprob <= 0
                assert len(score.top) == logprobs
                assert [logprob for _, logprob in score.top] == sorted((p for _, p in score.top), reverse=True)
                assert len({token for token, _ in score.top}) == logprobs
                if logprobs:
                    assert score.top[0][0] == result.tokens[0]
                    assert score.top[0][1] == pytest.approx(score.logprob)

    @pytest.mark.parametrize("output_limit", [0, 4])
    def test_scored_prefill_scores_all_but_the_first_prompt_token(self, host: Host, output_limit: int) -> None:
        prompt = prompt_of(33, 23)
        row = host.admit(0, prompt, prompt_logprobs=2, output_limit=output_limit)
        (whole,) = host.prefill(row, shape=SCORED)
        assert whole.prompt_scores is not None
        assert len(whole.prompt_scores) == 32
        assert len(whole.tokens) == min(1, output_limit)
        assert all(score.logprob <= 0 and len(score.top) == 2 for score in whole.prompt_scores)
        chunked = host.admit(1, prompt, prompt_logprobs=2, output_limit=output_limit)
        results = host.prefill(chunked, shape=SCORED, chunk=16)
        assert [len(result.prompt_scores or ()) for result in results] == [16, 16, 0]
        scores = [score for result in results for score in result.prompt_scores or ()]
        expected = [score.logprob for score in whole.prompt_scores]
        assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)
        assert chunked.tokens == row.tokens

    def test_a_scored_prompt_decodes_like_a_plain_one(self, host: Host) -> None:
        prompt = prompt_of(20, 24)
        plain = list(host.generate(host.admit(0, prompt), 4))
        row = host.admit(1, prompt, prompt_logprobs=0)
        (result,) = host.prefill(row, shape=SCORED)
        assert all(score.top == () for score in result.prompt_scores or ())
        host.decode([row], 4)
        assert row.tokens == plain
