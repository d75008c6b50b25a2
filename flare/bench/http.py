"""A light HTTP/1.1 client.

Owns one request on one connection, its parsing left to httptools. Does not own what the bytes mean. Surprising rule:
the time of arrival is taken once per read from the socket, before anything is parsed, and is given along with the
bytes: the client shares its cores with the server that it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[int, bytes], None]
"""Called with the arrival (ns, `time.perf_counter_ns`) and a piece of the body."""


class HttpError(Exception):
    """No whole answer came; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: `url` without a path (such as `http://127.0.0.1:8000`), and the API key if one is needed."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is not of the form http://HOST:PORT")


@dataclass(slots=True)
class _Answer(asyncio.Protocol):
    on_body_piece: OnBody
    done: asyncio.Future[int]
    arrived_ns: int = 0
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.arrived_ns = time.perf_counter_ns()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an HTTP answer: {error}")

    def on_body(self, body: bytes) -> None:
        self.on_body_piece(self.arrived_ns, body)

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(self.parser.get_status_code())

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {exc}" if exc else "the connection was closed before the answer's end")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(HttpError(why))


async def request(server: Server, method: str, path: str, body: bytes, on_body: OnBody) -> int:
    """Send one request and hand on its answer's body piece by piece. Returns the status code.

    Raises `HttpError` for a connection that fails or breaks, an answer that is not HTTP, or none in time.
    """
    try:
        async with asyncio.timeout(server.timeout_s):
            return await _request(server, method, path, body, on_body)
    except TimeoutError as error:
        raise HttpError(f"no whole answer within {server.timeout_s:g} s") from error
    except OSError as error:
        raise HttpError(f"cannot reach {server.url}: {error}") from error


async def _request(server: Server, method: str, path: str, body: bytes, on_body: OnBody) -> int:
    parts = urlsplit(server.url)
    if parts.hostname is None:
        raise HttpError(f"{server.url!r} names no host")
    secure = parts.scheme == "https"
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()
    transport, _ = await loop.create_connection(
        lambda: _Answer(on_body, done), parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
    )
    authorization = f"Authorization: Bearer {server.api_key}\r\n" if server.api_key else ""
    head = (
        f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    try:
        transport.write(head.encode() + body)
        return await done
    finally:
        transport.close()


async def fetch(server: Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """The status and the whole body of one answer. Raises `HttpError` as `request` does."""
    pieces: list[bytes] = []
    status = await request(server, method, path, body, lambda _, piece: pieces.append(piece))
    return status, b"".join(pieces)
