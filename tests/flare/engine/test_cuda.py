"""The engine on the CUDA device: on the fake runtime, without a model."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import httpx
import pytest

from flare.config.loader import load_settings
from flare.engine.engine import Engine
from flare.engine.stream import Stream
from flare.graphs.device import DeviceLost
from flare.graphs.frames import Frame
from flare.graphs.sim.tokens import TokenSource
from flare.run import Parts, serve_parts
from flare.server.engine_api import Health, NotServing, RequestFailed
from tests.flare.engine.harness import CATALOG, LETTERS, collect, compose, request
from tests.graphs.cuda.devices import TinyDevice
from tests.graphs.cuda.fake_runtime import FakeRuntime, Synchronized
from tests.graphs.cuda.watch import watched
from tests.server.events import split_events
from tests.server.serving import context_for


def tiny(runtime: FakeRuntime, kind: type[TinyDevice] = TinyDevice) -> TinyDevice:
    """A device of four slots that draws letters."""
    return kind(CATALOG, runtime, slots=4, pages=32, max_model_len=128, tokens=TokenSource(LETTERS))


@pytest.fixture
def runtime() -> FakeRuntime:
    """Slow enough for two frames to be in flight."""
    return FakeRuntime(slowest_s=0.0005, checks=False)


@asynccontextmanager
async def serving(
    runtime: FakeRuntime, kind: type[TinyDevice] = TinyDevice, *, watch: bool = False
) -> AsyncIterator[Engine]:
    """An engine that serves while the context is open."""
    device = tiny(runtime, kind)
    device.prepare(CATALOG, lambda *_: None)
    engine, scheduler, _ = compose(device, CATALOG)
    try:
        with watched(runtime, device.on_card) if watch else nullcontext():
            async with anyio.create_task_group() as tasks:
                await tasks.start(engine.run)
                yield engine
                with anyio.fail_after(10):
                    while not scheduler.idle:  # noqa: ASYNC110 - the scheduler is pure and signals nobody
                        await anyio.sleep(0.001)
                scheduler.check()
                tasks.cancel_scope.cancel()
    finally:
        device.close()


async def text_of(stream: Stream) -> str:
    """All that a stream gives."""
    return "".join([delta.text for delta in await collect(stream)])


@pytest.mark.asyncio
async def test_many_requests_are_served_and_the_loop_never_waits_for_the_card(runtime: FakeRuntime) -> None:
    async with serving(runtime, watch=True) as engine:
        requests = [request(f"prompt {number}", 20) for number in range(9)]
        texts = [await text_of(stream) for stream in engine.submit(requests)]
        again = [await text_of(engine.submit([one])[0]) for one in requests]
    assert texts == again
    assert all(len(text) == 20 for text in texts) and len({*texts}) == 9
    assert runtime.calls["wait"] > 100


class Settles(TinyDevice):
    """Waits for all that is under way before each frame."""

    def submit(self, frame: Frame) -> None:
        self._runtime.settle()
        super().submit(frame)


class WaitsForTheFrame(TinyDevice):
    """Waits for the frame before."""

    def submit(self, frame: Frame) -> None:
        if self._seats:
            self._runtime.wait(self._seats[0].done)
        super().submit(frame)


class Looks(TinyDevice):
    """Reads from the card's memory how many tokens a row has."""

    def submit(self, frame: Frame) -> None:
        self.told = self.on_card[4].tolist()
        super().submit(frame)


class Computes(TinyDevice):
    """Asks torch for something that waits for its answer."""

    def submit(self, frame: Frame) -> None:
        self.told = self.on_card[4].max()
        super().submit(frame)


@pytest.mark.parametrize("plant", [Settles, WaitsForTheFrame, Looks, Computes])
@pytest.mark.asyncio
async def test_a_call_that_waits_for_the_card_on_the_loop_is_found(
    runtime: FakeRuntime, plant: type[TinyDevice]
) -> None:
    with pytest.RaisesGroup(Synchronized):
        async with serving(runtime, plant, watch=True) as engine:
            (stream,) = engine.submit([request(max_tokens=20)])
            with pytest.raises(RequestFailed):
                await collect(stream)


@pytest.mark.parametrize(("call", "at"), [("launch", 3), ("copy", 8), ("elapsed_ns", 3), ("record", 7)])
@pytest.mark.asyncio
async def test_a_failed_frame_fails_its_requests_and_serving_goes_on(runtime: FakeRuntime, call: str, at: int) -> None:
    async with serving(runtime) as engine:
        alone = await text_of(engine.submit([request("other", 30)])[0])
        runtime.fail(call, at)
        (doomed,) = engine.submit([request("doomed", 30)])
        with pytest.raises(RequestFailed, match="The frame that served the request failed"):
            await collect(doomed)
        (after,) = engine.submit([request("other", 30)])
        assert await text_of(after) == alone
        assert engine.health is Health.SERVING


@pytest.mark.parametrize(("call", "name"), [("launch", "cudaErrorLaunchFailure"), ("wait", "cudaErrorIllegalAddress")])
@pytest.mark.asyncio
async def test_a_lost_card_ends_every_stream_and_admission(runtime: FakeRuntime, call: str, name: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(DeviceLost, match=name)):
        async with serving(runtime) as engine:
            streams = engine.submit([request(f"{number}", 50) for number in range(8)])
            runtime.fail(call, 9, name)
            for stream in streams:
                with pytest.raises(RequestFailed, match="The server's log says why"):
                    await collect(stream)
            assert engine.health is Health.DEAD
            with pytest.raises(NotServing):
                engine.submit([request()])
            await anyio.sleep_forever()


def test_a_server_whose_card_is_lost_says_so_and_exits_with_an_error(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: the stream ends with an error event, `/health` turns to 503, and after a while it exits with 1."""
    monkeypatch.setattr("flare.run._LOST_S", 4.0)
    settings = load_settings(None, {"shutdown_timeout_s": 1.0})
    device = tiny(runtime)
    engine, _, _ = compose(device, CATALOG)
    context = context_for(engine)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[Any] = []

    def client() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as http:
            while http.get("/health").status_code != 200:
                pass
            runtime.fail("launch", 6, "cudaErrorLaunchFailure")
            asked = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "stream": True}
            seen.append(split_events(http.post("/v1/completions", json=asked).content)[-1])
            health, refused = http.get("/health"), http.post("/v1/completions", json=asked)
            seen.extend([health.status_code, health.json(), refused.status_code])

    thread = threading.Thread(target=client)
    thread.start()
    status = anyio.run(serve_parts, settings, CATALOG, Parts(device, engine, context), listener)
    thread.join()
    error, *rest = seen
    assert b'"error"' in error
    assert rest == [503, {"status": "dead"}, 503]
    assert status == 1
