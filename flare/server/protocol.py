"""HTTP/1.1 as it comes off a connection, within limits.

Owns the bounds of a request's head, and the answer to what is no HTTP. Does not own parsing or writing (uvicorn and
httptools do). Surprising rule: requests are not pipelined. While one is answered nothing further is taken from its
connection, which closes afterwards, since a client that leaves is noticed only while its connection is being read.
"""

from __future__ import annotations

import asyncio

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .errors import ApiError, error_response

HEAD_BYTES_MAX = 64 * 1024
HEAD_S_MAX = 60.0
"""Time for the first line and headers of a request, from its first byte or the connection's beginning."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, which bounds bodies by itself (it stops reading), with bounds on everything else."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(431, f"The request's first line and headers are larger than {HEAD_BYTES_MAX} bytes.")

    def on_message_begin(self) -> None:
        if self._answering():
            self._deaf = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self._await_head()

    def on_url(self, url: bytes) -> None:
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._deaf:
            self._head_done()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP."""
        if not self._deaf:
            self._refuse(400, "The request is not valid HTTP/1.1.")

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S_MAX, self.timeout_keep_alive_handler)

    def _head_done(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and close; nothing more is taken from this connection."""
        self._deaf = True
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self._answering() or not self.cycle.response_started:
            answer = error_response(ApiError(status, message, code="invalid_http"))
            headers = [*self.server_state.default_headers, *answer.raw_headers, (b"connection", b"close")]
            head = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[status] + head + b"\r\n" + bytes(answer.body))
        self.transport.close()
