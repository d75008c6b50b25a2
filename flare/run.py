"""`flare run`: the composition root of the server.

Owns the order of starting and stopping: settings, log, model, device, engine, HTTP. Does not own what any of them does.
Surprising rule: HTTP answers before the device is ready (with 503), and goes on answering while the last streams drain,
so that whoever asks `/health` is never left without an answer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import anyio
import structlog
import uvicorn

from flare.config.schema import ConfigError, Policy, Settings
from flare.graphs.cuda.failures import DeviceFailure
from flare.graphs.device import Device, DeviceLost
from flare.graphs.weights.errors import ModelError
from flare.machines.graph import GraphShape
from flare.machines.pages import PagePool
from flare.machines.waiting import WaitingQueue

from .device import make_device
from .device_choice import Choice
from .draft import open_draft
from .engine.engine import Engine
from .engine.reporting import Reporter
from .graph_plan import check_pages, context_length, read_plan
from .log import configure_logging
from .metrics import Metrics
from .model import Model, open_model
from .progress import LoadProgress
from .request import GenerationRequest
from .scheduling import make_scheduler
from .server.app import create_app
from .server.auth import account
from .server.context import Limits, ServerContext
from .server.engine_api import Health
from .server.protocol import BoundedHttp
from .tokens.assembler import TextAssembler
from .trace import TraceWriter, open_trace

_FLUSH_S = 2.0
"""Time for the last bytes of drained streams to leave before connections are closed."""

_LOST_S = 10.0
"""How long a server whose device is lost tells whoever asks `/health`, before it exits to be started anew."""

_KEEP_ALIVE_S = 65
"""Longer than clients and proxies keep an idle connection, so that none is closed just as they use it again."""

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter from the device's thread; the default of 5 ms is half a frame."""


def serve(choice: Choice) -> int:
    """Run a server until it is told to stop; returns the exit status."""
    settings = choice.settings
    try:
        policy, catalog = read_plan(settings)
        trace = _open_trace(settings)
    except ConfigError as error:
        print(f"flare run: {error}", file=sys.stderr)
        return 2
    configure_logging(json_lines=settings.log_json, trace=trace)
    structlog.get_logger().info("device.chosen", device=settings.device, reason=choice.reason)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    status: int | None = 2
    try:
        with _bound(settings) as listener:  # first: fetching a model takes minutes, and would be in vain
            with LoadProgress() as progress:
                model = open_model(settings.model, progress.fetching)
                draft = open_draft(settings, model, progress.fetching)
            longest = context_length(settings, model)
            device = make_device(settings, catalog, model, draft, longest, choice.runtime)
            parts = compose(settings, policy, catalog, model, device, trace)
            with _naming(settings):
                listener.listen(1024)
            status = anyio.run(serve_parts, settings, catalog, parts, listener, backend_options={"use_uvloop": True})
    except* (ModelError, ConfigError, DeviceFailure) as refused:  # weights are read within a task group
        print(f"flare run: {refused.exceptions[0]}", file=sys.stderr)
    finally:
        if trace is not None:
            trace.close()
    if status is None:
        os._exit(0)  # nothing interrupts the thread that prepares, and the interpreter would wait for its end
    return status


def _open_trace(settings: Settings) -> TraceWriter | None:
    try:
        return open_trace(Path(settings.trace) if settings.trace else None, to_stderr=settings.log_json)
    except OSError as error:
        raise ConfigError(f"trace: cannot write {settings.trace}: {error.strerror}; choose another file") from None


@dataclass(frozen=True, slots=True)
class Parts:
    """The composed server: what `serve_parts` starts and stops."""

    device: Device
    engine: Engine
    context: ServerContext


def compose(
    settings: Settings,
    policy: Policy,
    catalog: tuple[GraphShape, ...],
    model: Model,
    device: Device,
    trace: TraceWriter | None,
) -> Parts:
    """Scheduler, engine and HTTP context over a device."""
    max_model_len = context_length(settings, model)
    check_pages(device.pages * device.page_tokens, max_model_len)
    served_names = settings.served_model_name or (model.name,)
    metrics = Metrics(served_names[0], compat_vllm=settings.metrics_compat == "vllm")
    scheduler = make_scheduler(
        policy,
        catalog,
        slots=settings.max_num_seqs,
        pages=PagePool(device.pages, device.page_tokens),
        waiting=WaitingQueue(
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
            {account("key", key.encode()): weight for key, weight in settings.client_weights.items()},
        ),
        device_allocates=settings.speculative == "adaptive",
        keeps_prefixes=settings.speculative.startswith("fixed"),
    )

    def assembler(request: GenerationRequest) -> TextAssembler:
        return TextAssembler(model.tokenizer, request.stop)

    engine = Engine(
        scheduler,
        device,
        Reporter(metrics, scheduler.durations, trace, views=settings.trace_views),
        assembler=assembler,
        eos_ids=model.tokenizer.eos_ids,
    )
    context = ServerContext(
        engine=engine,
        tokenizer=model.tokenizer,
        chat=model.chat,
        served_names=served_names,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab,
        token_bytes_max=max(len(model.tokenizer.token_bytes(token)) for token in range(model.tokenizer.vocab_size)),
        render_metrics=metrics.render,
        random_bits=lambda: secrets.randbits(63),
        unix_s=lambda: int(time.time()),
        started_unix_s=int(time.time()),
        version=version("flare-serve"),
        api_keys=settings.api_key,
        allowed_origins=settings.allowed_origins,
        ping_interval_s=settings.sse_ping_interval_s,
        limits=Limits(
            body_bytes=settings.max_body_bytes,
            sequences=min(Limits().sequences, settings.max_num_seqs + settings.max_num_queued_reqs),
        ),
    )
    return Parts(device, engine, context)


def _bound(settings: Settings) -> socket.socket:
    """A socket that has the address and refuses connections yet. Raises `ConfigError` where it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because event loops turn off Nagle's algorithm only where they see that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _naming(settings):
            listener.bind((settings.host, settings.port))
    except ConfigError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _naming(settings: Settings) -> Iterator[None]:
    """Says of which address an OSError is: raises `ConfigError` instead."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; choose another --host or --port"
        ) from None


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `serve_parts` decides when connections are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_parts(
    settings: Settings, catalog: tuple[GraphShape, ...], parts: Parts, listener: socket.socket
) -> int | None:
    """Prepare and serve until told to stop; the exit status, or None if the device was still being prepared."""
    log = structlog.get_logger()
    http = _HttpServer(
        uvicorn.Config(
            create_app(parts.context),
            loop="none",
            http=BoundedHttp,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="error",  # its warnings tell of clients' faults
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(_FLUSH_S),
        )
    )
    prepared = False
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_serve_http, http, listener, tasks.cancel_scope)
            tasks.start_soon(_stop_on_signal, parts.engine, http, settings.shutdown_timeout_s)
            started = time.monotonic()
            with LoadProgress() as progress:
                await anyio.to_thread.run_sync(parts.device.prepare, catalog, progress.prepared, abandon_on_cancel=True)
            prepared = True
            gc.collect()
            gc.freeze()  # what a start leaves behind lives on; a full pass over it would halt every stream for long
            log.info(
                "server.ready",
                url=f"http://{settings.host}:{listener.getsockname()[1]}/v1",
                model=parts.context.served_names[0],
                graphs=len(catalog),
                context=parts.context.max_model_len,
                prepared_s=round(time.monotonic() - started, 1),
            )
            await _run_engine(parts.engine, http)
    finally:
        if prepared:  # else a thread may still be at work on the device's memory
            parts.device.close()
    if not prepared:
        return None
    return 1 if parts.engine.health is Health.DEAD else 0


async def _serve_http(http: uvicorn.Server, listener: socket.socket, scope: anyio.CancelScope) -> None:
    """Answer until told to stop, let the last answers leave, close the socket, and end the rest."""
    await http.serve([listener])
    scope.cancel()


async def _run_engine(engine: Engine, http: uvicorn.Server) -> None:
    """Run the engine; if it dies, HTTP stays up to say so: for a while, where nothing but a new process helps."""
    try:
        await engine.run()
    except DeviceLost as error:
        structlog.get_logger().error("device.lost", reason=str(error), exits_in_s=_LOST_S)
        await anyio.sleep(_LOST_S)
        http.should_exit = True
    except Exception:  # noqa: BLE001 - the engine has died and told its clients; the server lives to report it
        structlog.get_logger().exception("engine.died")


async def _stop_on_signal(engine: Engine, http: uvicorn.Server, timeout_s: float) -> None:
    """The first SIGTERM or SIGINT drains. The second stops at once, and so does the first while loading."""
    log = structlog.get_logger()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            async for number in signals:
                if engine.health in (Health.DRAINING, Health.LOADING):
                    log.warning("server.stopping_now", signal=signal.Signals(number).name)
                    timeout_s = 0.0
                else:
                    log.info("server.draining", signal=signal.Signals(number).name, timeout_s=timeout_s)
                tasks.start_soon(_drain, engine, http, timeout_s)


async def _drain(engine: Engine, http: uvicorn.Server, timeout_s: float) -> None:
    await engine.drain(timeout_s)
    with anyio.move_on_after(_FLUSH_S):  # streams have ended; their last events may still have to be written
        while http.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event for it
            await anyio.sleep(0.02)
    http.should_exit = True
