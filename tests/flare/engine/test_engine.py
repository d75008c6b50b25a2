"""The engine over the paced device: every token delivered once, and nothing left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from flare.engine.job import SILENT_MAX
from flare.explain import logged_view
from flare.graphs.device import DeviceLost
from flare.graphs.frames import Sampling
from flare.graphs.sim.timing import Fault, Faults, by_kind
from flare.machines.events import Effect, Event, Published
from flare.machines.graph import GraphKind
from flare.machines.ids import Fence, RequestHandle
from flare.machines.request import EndReason
from flare.machines.selection.board import Board
from flare.machines.selection.reference import normalizers
from flare.request import Endpoints
from flare.server.engine_api import Health, NotServing, QueueFull, RequestFailed, ServerStopping
from flare.trace import open_trace
from flare.trace_reader import read_plans
from tests.flare.engine.harness import EOS, collect, request, running

pytestmark = pytest.mark.asyncio


async def test_a_request_is_delivered_to_its_last_token() -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request("hello world, this is long", 7)])
        deltas = await collect(stream)
        assert len("".join(delta.text for delta in deltas)) == 7
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is EndReason.LENGTH
        assert deltas[-1].completion_tokens == 7
        await rig.settled()


async def test_the_same_text_alone_and_among_others() -> None:
    async with running() as rig:
        (alone,) = rig.engine.submit([request("same", 20)])
        text = "".join(delta.text for delta in await collect(alone))
        streams = rig.engine.submit([request("same", 20), *(request(f"other {i}", 9 + i) for i in range(7))])
        texts: dict[int, str] = {}

        async def read(index: int) -> None:
            texts[index] = "".join(delta.text for delta in await collect(streams[index]))

        async with anyio.create_task_group() as tasks:
            for index in range(len(streams)):
                tasks.start_soon(read, index)
        assert texts[0] == text
        assert [len(texts[index]) for index in range(1, 8)] == [9 + i for i in range(7)]
        await rig.settled()


async def test_eos_ends_without_text_and_counts() -> None:
    async with running(eos_at=lambda _hash, _prompt, index: index == 3) as rig:
        (ended,) = rig.engine.submit([request(max_tokens=10)])
        deltas = await collect(ended)
        assert (deltas[-1].finish_reason, deltas[-1].completion_tokens) == (EndReason.STOP, 4)
        assert len("".join(delta.text for delta in deltas)) == 3
        (ignored,) = rig.engine.submit([request(max_tokens=10, ignore_eos=True)])
        assert (await collect(ignored))[-1].completion_tokens == 10
        (patient,) = rig.engine.submit([request(max_tokens=10, min_tokens=6)])
        assert (await collect(patient))[-1].completion_tokens == 10
        (named,) = rig.engine.submit([request(max_tokens=10, ignore_eos=True, stop_token_ids=(EOS,))])
        assert (await collect(named))[-1].stop_reason == EOS
        await rig.settled()


async def test_a_named_stop_token_counts_and_has_no_text() -> None:
    async with running() as rig:
        (plain,) = rig.engine.submit([request(max_tokens=12)])
        text = "".join(delta.text for delta in await collect(plain))
        forced = Sampling(temperature=0.0, logit_bias=((ord("#"), 100.0),))
        (stopped,) = rig.engine.submit([request(max_tokens=12, sampling=forced, stop_token_ids=(ord("#"),))])
        deltas = await collect(stopped)
        assert "".join(delta.text for delta in deltas) == ""
        assert (deltas[-1].completion_tokens, deltas[-1].stop_reason) == (1, ord("#"))
        assert deltas[-1].offsets == (0,) and "#" not in text
        await rig.settled()


async def test_silence_that_no_service_ends_passes_for_visible_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens without text must not make a stream that is served look like one that is not."""
    async with running() as rig:
        published: list[Fence] = []
        apply = rig.scheduler.apply

        def noting(event: Event, now_ns: int) -> list[Effect]:
            if isinstance(event, Published):
                published.append(event.fence)
            return apply(event, now_ns)

        monkeypatch.setattr(rig.scheduler, "apply", noting)
        forced = Sampling(temperature=0.0, logit_bias=((EOS, 100.0),))
        (mute,) = rig.engine.submit([request(max_tokens=20, sampling=forced, ignore_eos=True)])
        deltas = await collect(mute)
        assert "".join(delta.text for delta in deltas) == ""
        assert len(published) == 20 - SILENT_MAX
        await rig.settled()


async def test_a_stop_string_ends_at_its_first_character() -> None:
    async with running() as rig:
        (plain,) = rig.engine.submit([request(max_tokens=12)])
        text = "".join(delta.text for delta in await collect(plain))
        stop = text[4:7]
        (stopped,) = rig.engine.submit([request(max_tokens=12, stop=(stop,))])
        deltas = await collect(stopped)
        assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (EndReason.STOP, stop)
        await rig.settled()


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ("#",)},
        {"min_tokens": 1},
        {"sampling": Sampling(temperature=0.0, presence_penalty=0.5)},
        {"sampling": Sampling(temperature=0.0, frequency_penalty=-0.5)},
        {"sampling": Sampling(temperature=0.0, repetition_penalty=1.1)},
    ],
)
async def test_frames_that_need_the_hosts_history_are_never_queued_behind_another(more: dict[str, Any]) -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request(max_tokens=12, **more)])
        await collect(stream)
        await rig.settled()
        assert not any(period.queued for period in rig.device.periods())


async def test_ordinary_decode_keeps_two_frames_in_flight() -> None:
    async with running(duration=by_kind(dict.fromkeys(GraphKind, 10_000_000))) as rig:
        (stream,) = rig.engine.submit([request(max_tokens=40)])
        await collect(stream)
        await rig.settled()
        assert any(period.queued for period in rig.device.periods())


async def test_penalties_carry_the_history_of_validated_tokens() -> None:
    async with running() as rig:
        sampling = Sampling(temperature=0.0, repetition_penalty=1.5)
        (stream,) = rig.engine.submit([request("abc", 4, sampling=sampling)])
        text = "".join(delta.text for delta in await collect(stream))
        last = rig.device.frames[-1].lanes[0].history
        assert last is not None
        assert set(last.token_ids.tolist()) == {*b"abc", *text[:3].encode()}
        assert int(last.output_counts.sum()) == 3
        await rig.settled()


async def test_prompt_scores_come_once_and_line_up() -> None:
    async with running() as rig:
        prompt = "a prompt of more than one chunk"
        (scored,) = rig.engine.submit([request(prompt, 0, prompt_logprobs=2)])
        (delta,) = await collect(scored)
        assert delta.finish_reason is EndReason.LENGTH
        assert delta.prompt_scores is not None and bytes(t.token_id for t in delta.prompt_scores).decode() == prompt
        assert delta.prompt_scores[0].logprob is None and all(t.logprob is not None for t in delta.prompt_scores[1:])
        (both,) = rig.engine.submit([request(prompt, 3, prompt_logprobs=0, logprobs=1)])
        deltas = await collect(both)
        scores = [delta.prompt_scores for delta in deltas if delta.prompt_scores is not None]
        assert len(scores) == 1 and len(scores[0]) == len(prompt)
        assert sum(len(delta.tokens) for delta in deltas) == 3
        await rig.settled()


async def test_chunks_stop_at_the_end_of_the_system_prompt() -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request("x" * 16, 1, endpoints=Endpoints(system_end=6, messages=(6, 16)))])
        await collect(stream)
        chunks = [
            (lane.start, len(lane.tokens)) for f in rig.device.frames for lane in f.lanes if lane.tokens is not None
        ]
        assert sum(length for _, length in chunks) == 16
        assert not any(start < 6 < start + length for start, length in chunks)
        await rig.settled()


@pytest.mark.parametrize("delay_ms", [0, 1, 3, 8])
async def test_cancelling_at_any_stage_leaves_nothing(delay_ms: int) -> None:
    async with running(slots=2) as rig:
        streams = rig.engine.submit([request("p" * 30, 30) for _ in range(5)])
        await anyio.sleep(delay_ms / 1000)
        for stream in streams[:4]:
            stream.cancel()
            stream.cancel()
        assert (await collect(streams[4]))[-1].completion_tokens == 30
        for stream in streams[:4]:
            assert await collect(stream) == []
        await rig.settled()
        assert b'finished_reason="abort",model_name="test"} 4.0' in rig.metrics.render()


async def test_a_failed_frame_fails_its_own_requests_alone() -> None:
    async with running(faults=Faults({Fence(4): Fault.FAILED})) as rig:
        streams = rig.engine.submit([request(f"request {i}", 12) for i in range(3)])
        outcomes: list[int | str] = []
        for stream in streams:
            try:
                outcomes.append((await collect(stream))[-1].completion_tokens)
            except RequestFailed as error:
                outcomes.append(str(error))
        failed = {lane.handle.slot for lane in rig.device.frames[3].lanes}
        assert [isinstance(outcome, str) for outcome in outcomes] == [slot in failed for slot in range(3)]
        told = {outcome for outcome in outcomes if isinstance(outcome, str)}
        assert told == {"The frame that served the request failed. The server's log says why."}
        assert rig.engine.health is Health.SERVING
        await rig.settled()


async def test_time_without_work_does_not_count_as_waiting() -> None:
    async with running(slots=1, queued=1) as rig:
        for pause_s in (1.1, 0.0):
            (stream,) = rig.engine.submit([request(max_tokens=1)])
            await collect(stream)
            await rig.settled()
            await anyio.sleep(pause_s)
        rig.engine.submit([request(max_tokens=50)] * 2)
        with pytest.raises(QueueFull) as refused:
            rig.engine.submit([request()])
        assert refused.value.retry_after_s == 1
        await rig.settled()


async def test_a_full_queue_refuses_all_or_none() -> None:
    async with running(slots=1, queued=2) as rig:
        accepted = rig.engine.submit([request(max_tokens=50)])
        with pytest.raises(QueueFull) as refused:
            rig.engine.submit([request() for _ in range(3)])
        assert refused.value.retry_after_s >= 1
        accepted += rig.engine.submit([request(), request()])
        with pytest.raises(QueueFull):
            rig.engine.submit([request()])
        for stream in accepted:
            await collect(stream)
        await rig.settled()
        assert b'reason="queue_full"} 2.0' in rig.metrics.render()


async def test_a_free_slot_without_pages_is_no_way_past_the_queue() -> None:
    async with running(slots=4, pages=4, queued=1) as rig:
        with pytest.raises(QueueFull):
            rig.engine.submit([request("x" * 16, 8) for _ in range(3)])
        for stream in rig.engine.submit([request("x" * 16, 8) for _ in range(2)]):
            await collect(stream)
        await rig.settled()


async def test_draining_lets_streams_end_and_refuses_new_ones() -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request(max_tokens=30)])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.engine.drain, 10.0)
            await anyio.lowlevel.checkpoint()
            with pytest.raises(NotServing):
                rig.engine.submit([request()])
            assert (await collect(stream))[-1].completion_tokens == 30
        assert rig.engine.health is Health.DRAINING
        await rig.settled()


async def test_the_grace_time_ends_with_an_error_not_with_silence() -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request(max_tokens=500)])
        await rig.engine.drain(0.01)
        with pytest.raises(ServerStopping):
            await collect(stream)
        await rig.settled()


async def test_a_slow_reader_finds_its_deltas_merged() -> None:
    async with running() as rig:
        (stream,) = rig.engine.submit([request(max_tokens=10, logprobs=0)])
        await rig.settled()
        (delta,) = await collect(stream)
        assert (len(delta.text), len(delta.tokens), len(delta.offsets)) == (10, 10, 10)
        assert delta.offsets == tuple(range(10))
        (scored,) = rig.engine.submit([request("scored", max_tokens=10, prompt_logprobs=0)])
        await rig.settled()
        (delta,) = await collect(scored)
        assert delta.prompt_scores is not None and len(delta.prompt_scores) == len("scored")


async def test_the_time_to_a_first_token_is_queue_time_and_prefill_time() -> None:
    async with running(slots=1) as rig:
        for stream in rig.engine.submit([request(max_tokens=3) for _ in range(3)]):
            await collect(stream)
        found = re.findall(r"flare:(\w+)_seconds_sum{.*} (\S+)", rig.metrics.render().decode())
        sums = {name: float(value) for name, value in found}
        queued = sums["request_queue_time"]
        assert 0 < queued < sums["time_to_first_token"]
        assert queued + sums["request_prefill_time"] == pytest.approx(sums["time_to_first_token"])


async def test_a_lost_device_ends_every_stream_and_health_says_so() -> None:
    with pytest.RaisesGroup(DeviceLost):
        await _lose_the_device()


async def test_a_device_that_is_lost_with_its_last_frame_is_noticed() -> None:
    """Nothing is submitted afterwards that it could refuse."""
    with pytest.RaisesGroup(DeviceLost):
        async with running(faults=Faults({Fence(1): Fault.LOST})) as rig:
            (doomed,) = rig.engine.submit([request(max_tokens=1)])
            with pytest.raises(RequestFailed):
                await collect(doomed)
            assert rig.engine.health is Health.DEAD
            await anyio.sleep_forever()


async def test_each_plan_and_completion_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = open_trace(path)
    assert trace is not None
    async with running(trace=trace) as rig:
        (stream,) = rig.engine.submit([request(max_tokens=5)])
        await collect(stream)
        await rig.settled()
        frames = len(rig.device.frames)
    trace.close()
    for plan in read_plans(path):
        view = logged_view(plan)
        assert plan.frames_ahead == len(view.window)
        for row in view.requests:
            rate, sigma_ms = normalizers(Board.of(view))[RequestHandle(row.slot, row.generation)]
            price = plan.prices[row.slot]
            assert price.token == (row.token_price * rate if row.token_price and rate else None)
            assert price.delivery == (row.delivery_price / sigma_ms if row.delivery_price and sigma_ms else None)
    assert plan.prices[0].token is not None and plan.prices[0].delivery is not None
    text = path.read_text()
    assert text.count('"event":"plan.committed"') == text.count('"event":"frame.completed"') == frames
    assert text.count('"event":"request.transition"') == 4


async def _lose_the_device() -> None:
    async with running(faults=Faults({Fence(3): Fault.LOST})) as rig:
        for doomed in rig.engine.submit([request(max_tokens=30) for _ in range(8)]):
            with pytest.raises(RequestFailed, match=r"^The (engine|frame) .* The server's log says why\.$"):
                await collect(doomed)
        assert rig.engine.health is Health.DEAD
        metrics = rig.metrics.render()
        assert b'finished_reason="error",model_name="test"} 8.0' in metrics
        assert b'num_requests_running{model_name="test"} 0.0' in metrics
        assert b'num_requests_waiting{model_name="test"} 0.0' in metrics
        with pytest.raises(NotServing):
            rig.engine.submit([request()])
        await anyio.sleep_forever()
