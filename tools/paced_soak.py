"""What the event loop and HTTP cost: the product's server on a paced device, read from another process.

`python tools/paced_soak.py --minutes 5`: decode frames of 10 ms in real time, two queued, 64 streams. Owns the device's
pace, the readers and the report: every token checked against the device's pure function, the frame period on the
device's thread, the loop's lag (lateness of a ticker of 10 ms) and CPU per token. Surprising rule: the model is the
default one with a longer context, since only its tokenizer is used and each stream lasts the whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import anyio
import msgspec
import numpy as np

from flare import run
from flare.config.loader import load_policy, load_recipe, load_settings
from flare.engine.engine import Engine
from flare.graphs.catalog import build_catalog
from flare.graphs.frames import Binding, Sampling
from flare.graphs.sim.core import SimCore
from flare.graphs.sim.paced import PacedDevice
from flare.graphs.sim.timing import by_kind
from flare.graphs.sim.tokens import TokenSource, hash_tokens
from flare.machines.graph import GraphKind
from flare.model import open_model
from flare.server.engine_api import Health

MS = 1_000_000
PAGE_TOKENS = 64
PROMPT_TOKENS = 16
TICK_NS = 10 * MS
LETTERS = range(81, 107)
"""The default model's tokens `a` to `z`: one character each, so that text can be compared with tokens."""

TEXT = re.compile(rb'"text":"([^"]*)"')
SOURCE = TokenSource(alphabet=LETTERS)


def prompt_of(stream: int) -> list[int]:
    """The prompt of a stream, in tokens."""
    return [LETTERS[(stream * 7 + index * index) % len(LETTERS)] for index in range(PROMPT_TOKENS - 1)] + [300 + stream]


def expected_text(stream: int, tokens: int) -> str:
    """What the stream must say, by the device's pure function."""
    prompt = np.array(prompt_of(stream), dtype=np.int32)
    prompt_hash = hash_tokens(prompt, 0)
    rules = SOURCE.rules(Binding((), Sampling(temperature=0.0), (), tokens))
    drawn = (SOURCE.draw(rules, prompt_hash, len(prompt), index, frozenset()) for index in range(tokens))
    return "".join(chr(ord("a") + LETTERS.index(token)) for token in drawn if token is not None)


# The readers, in a process of their own


class ReaderReport(msgspec.Struct, frozen=True):
    """What the readers saw. `gaps_ms`: the time between two events of a stream, rounded down, and how often."""

    tokens: int
    events: int
    wrong: list[str]
    gaps_ms: list[tuple[float, int]]


@dataclass(slots=True)
class Reader(asyncio.Protocol):
    """One stream. `gaps` counts the milliseconds between its events, in tenths."""

    gaps: Counter[int]
    ended: asyncio.Future[None]
    buffer: bytes = b""
    pieces: list[bytes] = field(default_factory=list)
    last_ns: int = 0
    done: bool = False
    status: bytes = b""

    def data_received(self, data: bytes) -> None:
        """Take the text out of whole lines."""
        now_ns = time.perf_counter_ns()
        whole, newline, self.buffer = (self.buffer + data).rpartition(b"\n")
        lines = whole + newline
        if not self.status:
            self.status = lines.partition(b"\r\n")[0]
        found = TEXT.findall(lines)
        if found:
            if self.last_ns:
                self.gaps[(now_ns - self.last_ns) // (MS // 10)] += 1
            self.last_ns = now_ns
            self.pieces.extend(found)
        if b"data: [DONE]" in lines:
            self.done = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer has ended."""
        if not self.ended.done():
            self.ended.set_result(None)


async def read_streams(port: int, streams: int, tokens: int) -> ReaderReport:
    """Read all streams to their end and compare each with what it must say."""
    loop = asyncio.get_running_loop()
    gaps: Counter[int] = Counter()
    readers: list[Reader] = []
    for stream in range(streams):
        request = {"prompt": prompt_of(stream), "max_tokens": tokens, "temperature": 0, "stream": True}
        body = msgspec.json.encode(request | {"ignore_eos": True})
        transport, reader = await loop.create_connection(lambda: Reader(gaps, loop.create_future()), "127.0.0.1", port)
        transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        readers.append(reader)
    await asyncio.gather(*(reader.ended for reader in readers))
    texts = [b"".join(reader.pieces).decode() for reader in readers]
    wrong = [
        f"stream {stream}: {len(text)} of {tokens} tokens, {reader.status!r}, done {reader.done}"
        for stream, (reader, text) in enumerate(zip(readers, texts, strict=True))
        if not reader.done or text != expected_text(stream, tokens)
    ]
    events = sum(len(reader.pieces) for reader in readers)
    gaps_ms = [(tenths / 10, count) for tenths, count in sorted(gaps.items())]
    return ReaderReport(sum(map(len, texts)), events, wrong, gaps_ms)


# The server


@dataclass(slots=True)
class Measured:
    """What the server's process measured of itself, between the first token and the last."""

    lags_ms: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    reader: ReaderReport | None = None


async def tick(measured: Measured) -> None:
    """Record how late each tick comes."""
    while True:
        due_ns = time.perf_counter_ns() + TICK_NS
        await asyncio.sleep(TICK_NS / 1e9)
        measured.lags_ms.append((time.perf_counter_ns() - due_ns) / 1e6)


def cpu_by_thread() -> dict[str, float]:
    """CPU seconds that each thread has used, by its name; `process` is their sum with those that have ended."""
    threads = {thread.name: thread.ident for thread in threading.enumerate() if thread.ident is not None}
    clocks = {name: time.pthread_getcpuclockid(ident) for name, ident in threads.items()}
    return {"process": time.process_time()} | {name: time.clock_gettime(clock) for name, clock in clocks.items()}


async def measure(engine: Engine, port: int, arguments: argparse.Namespace, tokens: int, measured: Measured) -> None:
    """Let the readers run against the server, measure, and stop the server as an operator would."""
    while engine.health is not Health.SERVING:  # noqa: ASYNC110 - a look from outside; the engine announces it to nobody
        await asyncio.sleep(0.05)
    command = [sys.executable, __file__, "--reader-port", str(port)]
    command += ["--streams", str(arguments.streams), "--tokens", str(tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    before = cpu_by_thread()
    ticker = asyncio.create_task(tick(measured))
    output, _ = await process.communicate()
    ticker.cancel()
    measured.cpu_s = {name: seconds - before.get(name, 0.0) for name, seconds in cpu_by_thread().items()}
    measured.reader = msgspec.json.decode(output, type=ReaderReport)
    os.kill(os.getpid(), signal.SIGTERM)


def soak(arguments: argparse.Namespace) -> tuple[PacedDevice, Measured]:
    """Serve and measure, until the readers have read all."""
    tokens = tokens_of(arguments)
    context = (PROMPT_TOKENS + tokens // PAGE_TOKENS + 1) * PAGE_TOKENS
    settings = load_settings(None, {"max_num_seqs": arguments.streams})
    catalog = build_catalog(load_recipe(settings.recipe), settings.max_num_seqs, settings.max_prefill_tokens)
    duration = by_kind(dict.fromkeys(GraphKind, round(arguments.frame_ms * MS)))
    pages = arguments.streams * context // PAGE_TOKENS
    device = PacedDevice(SimCore(arguments.streams, pages, PAGE_TOKENS, duration, tokens=SOURCE, strict=True))
    model = replace(open_model(None, lambda *_: None), context_length=context)
    parts = run.compose(settings, load_policy(settings.scheduler_policy), catalog, model, device, None)
    sys.setswitchinterval(run.SWITCH_INTERVAL_S)
    measured = Measured()

    async def all_of_it() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(measure, parts.engine, port, arguments, tokens, measured)
                await run.serve_parts(settings, catalog, parts, listener)

    anyio.run(all_of_it, backend_options={"use_uvloop": True})
    return device, measured


def tokens_of(arguments: argparse.Namespace) -> int:
    """The output tokens of each stream: a frame each, for the whole time."""
    return round(float(arguments.minutes) * 60_000 / float(arguments.frame_ms))


def report(arguments: argparse.Namespace, device: PacedDevice, measured: Measured) -> int:
    """Print what was measured. 1 if a token was not delivered or the period missed its bounds."""
    reader, total = measured.reader, arguments.streams * tokens_of(arguments)
    if reader is None:
        print("WRONG the readers did not report")
        return 1
    wrong = list(reader.wrong)
    print(f"tokens delivered {reader.tokens} of {total}, in {reader.events} events")
    periods = device.periods()
    periods_ms = [period.period_ns / 1e6 for period in periods]
    queued = sum(period.queued for period in periods) / len(periods)
    median_ms, p99_ms = statistics.median(periods_ms), float(np.quantile(periods_ms, 0.99))
    print(f"frame period, {len(periods)} periods: {spread(periods_ms)}; queued in time {queued:.2%}")
    print(f"loop lag: {spread(measured.lags_ms)}")
    print(f"gaps at the readers: {spread([gap for gap, count in reader.gaps_ms for _ in range(count)])}")
    for thread, seconds in measured.cpu_s.items():
        print(f"CPU of {thread}: {seconds:.1f} s, {seconds / total * 1e6:.1f} us per token")
    bounds = (1.03 * arguments.frame_ms, 1.3 * arguments.frame_ms)
    if median_ms > bounds[0] or p99_ms > bounds[1]:
        wrong.append(f"the period's median and p99 must not pass {bounds[0]:.2f} and {bounds[1]:.2f} ms")
    for each in wrong:
        print(f"WRONG {each}")
    return 1 if wrong else 0


def spread(values: Iterable[float]) -> str:
    """Median, p99 and maximum of milliseconds."""
    median, p99, largest = np.quantile(np.fromiter(values, float), [0.5, 0.99, 1.0])
    return f"median {median:.2f}, p99 {p99:.2f}, max {largest:.2f} ms"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `tokens` and `reader_port` are for the subprocess."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--frame-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reader-port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Either the whole measurement, or (in its subprocess) the readers."""
    arguments = parse()
    if arguments.reader_port is None:
        return report(arguments, *soak(arguments))
    seen = asyncio.run(read_streams(arguments.reader_port, arguments.streams, arguments.tokens))
    print(msgspec.json.encode(seen).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
