"""Prompts and streams at once, served by the engine itself on a device.

Owns the load and its figures. Does not own the engine; HTTP and tokenizing are left out. Surprising rule: a model with
random weights has no text, so every token is shown as one letter, which costs the engine what text does.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio

from flare.config.loader import load_policy
from flare.engine.engine import Engine
from flare.engine.reporting import Reporter
from flare.graphs.device import OnCompletion, OnProgress
from flare.graphs.frames import Frame, Sampling
from flare.machines.graph import GraphShape
from flare.machines.pages import PagePool
from flare.machines.waiting import WaitingQueue
from flare.metrics import Metrics
from flare.request import GenerationRequest
from flare.scheduling import make_scheduler
from flare.tokens.assembler import TextAssembler
from flare.tokens.tokenizer import Tokenizer

from .player import Player, prompt_of
from .report import Finding


@dataclass(frozen=True)
class Load:
    """So many clients at a time, each asking again once it is answered, until all `requests` are. Prompt and output
    tokens are drawn between two ends."""

    clients: int = 48
    requests: int = 192
    prompt: tuple[int, int] = (32, 1500)
    output: tuple[int, int] = (32, 192)


@dataclass
class Seen:
    """What clients saw, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0


class _Letters:
    """Stands for a tokenizer where text is made."""

    def token_bytes(self, token: int) -> bytes:
        return b"abcdefghijklmnopqrstuvwxyz"[token % 26 :][:1]

    def is_special(self, _token: int) -> bool:
        return False


class _Lent:
    """A player's device, which is prepared and started, for an engine."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.request_slots = player.device.request_slots
        self.pages = player.device.pages
        self.page_tokens = player.device.page_tokens

    def prepare(self, catalog: Sequence[GraphShape], progress: OnProgress) -> None:
        """It is."""

    def start(self, on_completion: OnCompletion) -> None:
        """Completions go to the engine from here on."""
        self._player.listener = lambda completion, _: on_completion(completion)

    def submit(self, frame: Frame) -> None:
        """See `Device.submit`."""
        self._player.device.submit(frame)

    def close(self) -> None:
        """Completions go to the player again."""
        self._player.listener = None


def serve_mixture(player: Player, vocab: int, load: Load) -> Iterator[Finding]:
    """Rates, first tokens and gaps; any request that failed is a fault."""
    began = time.monotonic()
    seen = anyio.run(_serve, player, vocab, load)
    took = time.monotonic() - began
    value = f"{seen.output_tokens / took:.0f} output and {seen.prompt_tokens / took:.0f} prompt tokens/s"
    yield Finding("mixed", f"{load.requests} requests, {load.clients} at a time", value)
    yield Finding("mixed", "time to first token", _spread(seen.first))
    yield Finding("mixed", "between tokens", _spread(seen.gaps))
    yield Finding("mixed", "requests that failed", str(seen.failed), "none", not seen.failed)


async def _serve(player: Player, vocab: int, load: Load) -> Seen:
    device, policy = _Lent(player), load_policy("balanced")
    scheduler = make_scheduler(
        policy,
        player.catalog,
        slots=device.request_slots,
        pages=PagePool(device.pages, device.page_tokens),
        waiting=WaitingQueue(None, None),
    )
    letters = cast(Tokenizer, _Letters())
    engine = Engine(
        scheduler,
        device,
        Reporter(Metrics("gpu-check"), scheduler.durations, None, views=False),
        assembler=lambda request: TextAssembler(letters, request.stop),
        eos_ids=(),
    )
    seen, requests = Seen(), _requests(vocab, load)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(engine.run)
            async with anyio.create_task_group() as clients:
                for _ in range(load.clients):
                    clients.start_soon(_client, engine, requests, seen)
            tasks.cancel_scope.cancel()
    finally:
        device.close()
    return seen


def _requests(vocab: int, load: Load) -> Iterator[GenerationRequest]:
    chance = random.Random(0)
    for number in range(load.requests):
        prompt = tuple(prompt_of(chance.randint(*load.prompt), number, vocab).tolist())
        yield GenerationRequest(f"mixed-{number}", "", prompt, chance.randint(*load.output), Sampling(seed=number))


async def _client(engine: Engine, requests: Iterator[GenerationRequest], seen: Seen) -> None:
    for request in requests:
        (stream,) = engine.submit([request])
        last = asked = time.monotonic()
        tokens = 0
        try:
            async for delta in stream:
                now = time.monotonic()
                if tokens:
                    seen.gaps.append(now - last)
                else:
                    seen.first.append(now - asked)
                last, tokens = now, delta.completion_tokens
        except Exception:  # noqa: BLE001 - whatever ended the stream, this request failed
            seen.failed += 1
        seen.prompt_tokens += len(request.prompt)
        seen.output_tokens += tokens


def _spread(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "too few to say"
    return (
        f"median {statistics.median(seconds) * 1e3:.1f} ms, p99 {statistics.quantiles(seconds, n=100)[98] * 1e3:.1f} ms"
    )
