"""An engine on the paced simulated device: what `flare run` composes, without HTTP or a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import anyio

from flare.config.loader import load_policy
from flare.engine.engine import Engine
from flare.engine.reporting import Reporter
from flare.engine.stream import Stream
from flare.graphs.device import Device
from flare.graphs.frames import Frame, Sampling
from flare.graphs.sim.acceptance import Acceptance, FixedAcceptance
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import Duration, Faults, by_kind
from flare.graphs.sim.tokens import EosAt, TokenSource, never
from flare.machines.durations import DurationTable
from flare.machines.graph import GraphKind, GraphShape
from flare.machines.pages import PagePool
from flare.machines.scheduler import Scheduler
from flare.machines.selection.view import PolicyRow
from flare.machines.waiting import WaitingQueue
from flare.metrics import Metrics
from flare.request import Delta, GenerationRequest
from flare.tokens.assembler import TextAssembler
from flare.tokens.tokenizer import Tokenizer
from flare.trace import TraceWriter

EOS = 256
LETTERS = tuple(range(ord("a"), ord("z") + 1))
CATALOG = (
    *(GraphShape(GraphKind.DECODE, batch) for batch in (1, 2, 4)),
    *(GraphShape(GraphKind.PREFILL, 1, tokens) for tokens in (4, 16)),
    *(GraphShape(GraphKind.SCORED_PREFILL, 1, tokens) for tokens in (4, 16)),
)
FAST = by_kind(dict.fromkeys(GraphKind, 500_000))


class ByteTokenizer:
    """Token ids are bytes; 256 is the end."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def is_special(self, token: int) -> bool:
        return token == EOS


class RecordingDevice(PacedDevice):
    """Notes the frames that it is given."""

    def __init__(self, core: SimCore) -> None:
        super().__init__(core)
        self.frames: list[Frame] = []

    def submit(self, frame: Frame) -> None:
        self.frames.append(frame)
        super().submit(frame)


@dataclass
class Rig:
    """A running engine and what surrounds it."""

    engine: Engine
    scheduler: Scheduler
    device: RecordingDevice
    metrics: Metrics

    async def settled(self) -> None:
        """Wait until nothing is left of any request."""
        with anyio.fail_after(10):
            while not self.scheduler.idle:  # noqa: ASYNC110 - the scheduler is pure and signals nobody
                await anyio.sleep(0.001)
        self.scheduler.check()
        assert self.scheduler.load() == (0, 0, 0.0)


def request(prompt: str = "hello", max_tokens: int = 5, **more: object) -> GenerationRequest:
    """A request whose tokens are bytes; greedy unless told otherwise."""
    values: dict[str, object] = {"client": "", "sampling": Sampling(temperature=0.0), **more}
    return GenerationRequest("test", prompt=tuple(prompt.encode()), max_tokens=max_tokens, **values)  # type: ignore[arg-type]


async def collect(stream: Stream) -> list[Delta]:
    """All deltas of a stream."""
    return [delta async for delta in stream]


def compose(
    device: Device, catalog: tuple[GraphShape, ...], *, queued: int | None = 256, trace: TraceWriter | None = None
) -> tuple[Engine, Scheduler, Metrics]:
    """An engine on a device."""
    policy = load_policy("balanced")
    durations = DurationTable(catalog, policy.estimate_ttl_ns)
    row = PolicyRow(64.0, 16.0, 4.0, 0.1, 8.0)
    scheduler = Scheduler(
        catalog,
        row,
        slots=device.request_slots,
        pages=PagePool(device.pages, device.page_tokens),
        waiting=WaitingQueue(queued, None),
        durations=durations,
        adaptation_ms=policy.adaptation_ms,
    )
    metrics = Metrics("test")
    tokenizer = cast(Tokenizer, ByteTokenizer())
    engine = Engine(
        scheduler,
        device,
        Reporter(metrics, durations, trace, views=trace is not None),
        assembler=lambda request: TextAssembler(tokenizer, request.stop),
        eos_ids=(EOS,),
    )
    return engine, scheduler, metrics


@asynccontextmanager
async def running(
    *,
    slots: int = 4,
    pages: int = 64,
    duration: Duration = FAST,
    eos_at: EosAt = never,
    faults: Faults | None = None,
    queued: int | None = 256,
    trace: TraceWriter | None = None,
    catalog: tuple[GraphShape, ...] = CATALOG,
    acceptance: Acceptance | None = None,
) -> AsyncIterator[Rig]:
    """An engine that serves while the context is open; it must survive."""
    core = SimCore(
        slots,
        pages,
        8,
        duration,
        tokens=TokenSource(LETTERS, eos_at=eos_at),
        faults=faults,
        acceptance=acceptance or FixedAcceptance(0),
        strict=True,
    )
    core.prepare(catalog)
    device = RecordingDevice(core)
    engine, scheduler, metrics = compose(device, catalog, queued=queued, trace=trace)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(engine.run)
            yield Rig(engine, scheduler, device, metrics)
            tasks.cancel_scope.cancel()
    finally:
        device.close()
