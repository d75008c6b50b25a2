"""Several clients at once, clients that leave, health under load, and stopping, with the real model."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from .events import Json
from .model_server import COUNT, ModelServer, eventually, run_model

LONG = " the" * 3000


def open_stream(stack: ExitStack, server: ModelServer, **fields: object) -> Iterator[str]:
    """The data lines of a stream of COUNT that is being read."""
    body = {"prompt": COUNT, "temperature": 0, "stream": True, **fields}
    response = stack.enter_context(server.client.stream("POST", "/v1/completions", json=body))
    assert response.status_code == 200
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def first(lines: Iterator[str]) -> Json:
    """The next event."""
    event: Json = json.loads(next(lines))
    return event


def frames(server: ModelServer, kind: str) -> int:
    """Completed frames of graphs of that kind."""
    rows = server.client.get("/graphs").json()
    return sum(row["executions"] for row in rows if row["kind"] == kind)


def test_running_streams_go_on_while_prompts_arrive(server: ModelServer) -> None:
    """While two long prompts are in prefill, at most a chunk of each lies between two tokens of a running stream."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        lines = open_stream(stack, server, max_tokens=400)
        first(lines)
        before = {kind: frames(server, kind) for kind in ("prefill", "speculative")}
        prompts = [pool.submit(server.complete, " the" * 2000, max_tokens=1) for _ in range(2)]
        assert all(prompt.result()["usage"]["completion_tokens"] == 1 for prompt in prompts)
        chunks, rounds = (frames(server, kind) - count for kind, count in before.items())
        assert chunks >= 2 * 2000 / 512
        assert rounds >= chunks // 2
    eventually(server.idle)


def test_a_short_prompt_does_not_wait_for_a_long_one(server: ModelServer) -> None:
    """They arrive at one instant, the long one first."""
    with ExitStack() as stack:
        lines = open_stream(stack, server, prompt=[LONG, COUNT], max_tokens=1)
        assert first(lines)["choices"][0]["index"] == 1
        assert first(lines)["choices"][0]["index"] == 0


def test_a_long_prompt_is_not_starved_by_short_ones(server: ModelServer) -> None:
    with ThreadPoolExecutor(5) as pool:
        long = pool.submit(server.complete, LONG, max_tokens=1)

        def keep_asking() -> int:
            count = 0
            while not long.done():
                server.complete(COUNT, max_tokens=4)
                count += 1
            return count

        asked = [pool.submit(keep_asking) for _ in range(4)]
        assert long.result()["usage"]["completion_tokens"] == 1
        assert sum(future.result() for future in asked) > 4


def test_health_answers_during_a_long_prefill(server: ModelServer) -> None:
    """No frame need end for an answer: some come, with that of /graphs around them, within one chunk."""
    with ThreadPoolExecutor(2) as pool:
        prompts = [pool.submit(server.complete, LONG, max_tokens=1) for _ in range(2)]
        eventually(lambda: server.metric("flare:num_requests_running") == 2)
        within_a_chunk = 0
        while not any(prompt.done() for prompt in prompts):
            before = frames(server, "prefill")
            assert server.client.get("/health").status_code == 200
            within_a_chunk += frames(server, "prefill") == before
        assert within_a_chunk > 2


@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_leaves_a_stream(server: ModelServer, after: int) -> None:
    eventually(server.idle)
    aborted = server.metric("flare:request_success_total", finished_reason="abort")
    with ExitStack() as stack:
        lines = open_stream(stack, server, max_tokens=4000)
        for _ in range(after):
            first(lines)
    eventually(server.idle)
    assert server.metric("flare:request_success_total", finished_reason="abort") == aborted + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": COUNT, "max_tokens": 4000},
        {"prompt": LONG, "max_tokens": 4000},
        {"prompt": COUNT, "max_tokens": 4000, "stop": [", 30, 31, 32, 33, X"]},
    ],
)
def test_a_client_that_leaves_without_streaming(server: ModelServer, fields: Json) -> None:
    """While decoding, while in prefill, while text is held back."""
    eventually(server.idle)
    aborted = server.metric("flare:request_success_total", finished_reason="abort")
    tokens = server.metric("flare:generation_tokens_total")
    request = server.client.build_request(
        "POST", "/v1/completions", json={"temperature": 0, "ignore_eos": True, **fields}
    )
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + request.content)
        if fields["prompt"] == LONG:
            eventually(lambda: server.metric("flare:num_requests_running") == 1)
        else:
            eventually(lambda: server.metric("flare:generation_tokens_total") > tokens + 1)
    eventually(server.idle)
    assert server.metric("flare:request_success_total", finished_reason="abort") == aborted + 1
    assert server.complete(COUNT, max_tokens=2)["choices"][0]["text"] == " 6"


def test_all_leave_at_once_queued_ones_too(server: ModelServer) -> None:
    eventually(server.idle)
    with ExitStack() as stack:
        streams = [open_stream(stack, server, max_tokens=4000, ignore_eos=True) for _ in range(24)]
        first(streams[0])
        eventually(lambda: server.metric("flare:num_requests_waiting") == 8)
        assert server.metric("flare:num_requests_running") == 16
    eventually(server.idle)
    assert server.complete(COUNT, max_tokens=2)["choices"][0]["text"] == " 6"


STOPPING = ("--max-num-seqs", "4", "--max-prefill-tokens", "64", "--kv-memory", "256MiB", "--eager")


def test_a_stop_lets_streams_finish(default_model_path: object) -> None:
    with run_model(*STOPPING) as server, ExitStack() as stack:
        streams = [open_stream(stack, server, max_tokens=60) for _ in range(3)]
        for lines in streams:
            first(lines)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.client.get("/health").status_code == 503)
        assert server.client.get("/live").status_code == 200
        assert server.client.post("/v1/completions", json={"prompt": "hi"}).status_code == 503
        for lines in streams:
            *_, last, done = list(lines)
            assert json.loads(last)["choices"][0]["finish_reason"] == "length"
            assert done == "[DONE]"
        assert server.ended() == 0


def test_the_end_of_patience_is_told(default_model_path: object) -> None:
    with run_model(*STOPPING, "--shutdown-timeout", "0.5") as server, ExitStack() as stack:
        lines = open_stream(stack, server, max_tokens=8000, ignore_eos=True)
        first(lines)
        server.process.send_signal(signal.SIGTERM)
        *_, last = list(lines)
        assert json.loads(last)["error"]["code"] == "server_stopping"
        assert server.ended() == 0


def test_a_second_signal_stops_at_once(default_model_path: object) -> None:
    with run_model(*STOPPING, "--shutdown-timeout", "10000") as server, ExitStack() as stack:
        lines = open_stream(stack, server, max_tokens=8000, ignore_eos=True)
        first(lines)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.client.get("/health").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        *_, last = list(lines)
        assert json.loads(last)["error"]["code"] == "server_stopping"
        assert server.ended() == 0


def test_a_signal_while_loading_stops_at_once(default_model_path: object) -> None:
    """The device was once closed under the thread that prepared it, and the process died of it."""
    with run_model(*STOPPING, serving=False) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
