"""A real server in this process, over the scripted engine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.applications import Starlette

from flare.server.app import create_app
from flare.server.context import Limits, ServerContext
from flare.server.protocol import BoundedHttp

from .scripted_engine import ScriptedEngine
from .tiny_tokens import TOKEN_BYTES_MAX, VOCAB_SIZE, ByteTokenizer, TinyChat

MAX_MODEL_LEN = 512
CREATED = 1_700_000_000
SMALL_LIMITS = Limits(body_bytes=64 * 1024, messages=8, inline_bytes=4 * 1024)


@dataclass(frozen=True)
class Served:
    """A running server: its engine (touch it through the portal alone) and a client of it."""

    engine: ScriptedEngine
    portal: BlockingPortal
    client: httpx.Client
    port: int

    def running(self) -> int:
        """Unfinished streams of the engine."""
        return self.portal.call(self.engine.running)

    def release(self) -> None:
        """Let waiting scripts go on."""
        self.portal.call(self.engine.release)


def context_for(engine: ScriptedEngine, **changes: object) -> ServerContext:
    """A context with fixed time and counted randomness."""
    numbers = iter(range(1, 1_000_000))
    fields: dict[str, object] = {
        "engine": engine,
        "tokenizer": ByteTokenizer(),
        "chat": TinyChat(),
        "served_names": ("tiny", "tiny-alias"),
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "token_bytes_max": TOKEN_BYTES_MAX,
        "render_metrics": lambda: b"flare:num_requests_running 0\n",
        "started_unix_s": CREATED,
        "random_bits": lambda: next(numbers),
        "unix_s": lambda: CREATED,
        "version": "1.2.3",
        "limits": SMALL_LIMITS,
        **changes,
    }
    return ServerContext(**fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def serve(engine: ScriptedEngine, **changes: object) -> Iterator[Served]:
    """Serve on a free port of 127.0.0.1 until the block ends."""
    with start_blocking_portal() as portal:
        app = portal.call(_build(engine, changes))
        # asyncio switches Nagle's delay off only for sockets that say which protocol they are of.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(app, http=BoundedHttp, log_level="error", access_log=False, lifespan="off")
        )
        serving = portal.start_task_soon(server.serve, [listener])
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                yield Served(engine, portal, client, port)
        finally:
            portal.call(engine.release)
            server.should_exit = True
            serving.result(timeout=30)


def _build(engine: ScriptedEngine, changes: dict[str, object]) -> Callable[[], Starlette]:
    return lambda: create_app(context_for(engine, **changes))
