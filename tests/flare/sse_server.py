"""A scripted OpenAI-style server for tests of the clients, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """What the server does. `broken` prompts get that status; a stream that is `cut` ends in the middle.
    `left` is released for each client that leaves before the end."""

    model: str = "scripted"
    tokenizer: bool = True
    usage: bool = True
    broken_status: int | None = None
    cut: bool = False
    error_event: bool = False
    endless: bool = False
    api_key: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    active_max: int = 0
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    graphs: list[dict[str, object]] = field(default_factory=list)


def count_tokens(prompt: str) -> int:
    """The script's tokenizer: a token for each word, and one for each full stop."""
    return len(prompt.split()) + prompt.count(".")


async def _serve(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        try:
            await _answer(script, reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, path, _ = head.split("\r\n", 1)[0].split(" ")
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
    body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths and int(lengths[0]) else {}
    if script.api_key is not None and f"authorization: bearer {script.api_key}" not in head.lower():
        _json(writer, 401, {"error": {"message": "Incorrect API key", "type": "invalid_request_error"}})
    elif path == "/v1/models":
        _json(writer, 200, {"object": "list", "data": [{"id": script.model}]})
    elif path == "/graphs":
        _json(writer, 200, script.graphs)
    elif path == "/tokenize" and script.tokenizer:
        _json(writer, 200, {"tokens": list(range(count_tokens(body["prompt"])))})
    elif path in ("/v1/completions", "/v1/chat/completions"):
        script.requests.append({"path": path, **body})
        await _generate(script, path, body, reader, writer)
    else:
        _json(writer, 404, {"error": {"message": f"no {method} {path}"}})


def _json(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} Status\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
    writer.write(data)


async def _generate(
    script: Script, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    if script.broken_status is not None:
        _json(writer, script.broken_status, {"error": {"message": "out of order"}})
        return
    script.active += 1
    script.active_max = max(script.active_max, script.active)
    gone = asyncio.create_task(reader.read())
    try:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(10**6 if script.endless else body["max_tokens"]):
            await asyncio.sleep(0.002)
            if gone.done():
                script.left.release()
                return
            text = f"w{number}\u2028 "
            choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
            _event(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
            if number == 1 and script.cut:
                return
            if number == 1 and script.error_event:
                _event(writer, {"error": {"message": "the frame failed"}})
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if script.usage:
            prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
            usage = {"prompt_tokens": count_tokens(prompt), "completion_tokens": body["max_tokens"]}
            _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    finally:
        script.active -= 1
        gone.cancel()


def _event(writer: asyncio.StreamWriter, body: object) -> None:
    """One event, in two chunks of the transfer, with a comment before it: a reader must put pieces together."""
    data = b": ping\n\ndata: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
    _chunk(writer, data[:25])
    _chunk(writer, data[25:])


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def scripted_server(script: Script) -> Iterator[str]:
    """Runs the server on a thread of its own; gives its URL."""
    started = threading.Event()
    where: list[str] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def run() -> None:
        ended = asyncio.Event()
        server = await asyncio.start_server(lambda r, w: _serve(script, r, w), "127.0.0.1", 0)
        where.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        stop.append((asyncio.get_running_loop(), ended))
        started.set()
        await ended.wait()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield where[0]
    finally:
        stop[0][0].call_soon_threadsafe(stop[0][1].set)
        thread.join()
