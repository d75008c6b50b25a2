"""What speculation brings to a served model, or costs it: pairs of runs, on and off, on the same requests.

Owns the tasks, the order of pairs and the interval of the ratio. Starts its servers itself and talks to them as any
client does. Surprising rule: all servers live side by side and answer in turn, so that whatever the machine does falls
on both halves of a pair alike; a cell ends when the 95% interval of its mean log ratio is narrow enough.

    python -m tools.bench_speculation --streams 1 --streams 4 --task chat --mode adaptive --mode fixed:4

Levels of `--streams` are gone through in their order, so that `1 8 1` shows how a server follows its load.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import openai
import typer
from rich.console import Console
from rich.table import Table

from tools.speculation_tasks import TASKS

OFF = "off"
FIRST_PORT = 8170
PAIRS_MIN = 6


class Cell(msgspec.Struct, frozen=True):
    """One comparison: tokens per second with and without, and the ratio with its 95% interval."""

    task: str
    mode: str
    streams: int
    pairs: int
    off: float
    on: float
    ratio: float
    low: float
    high: float


@dataclass(slots=True)
class Served:
    """A server of one mode."""

    process: subprocess.Popen[bytes]
    url: str
    model: str = ""

    def client(self) -> openai.AsyncOpenAI:
        """A client of it; what it cannot be asked is not asked again."""
        return openai.AsyncOpenAI(base_url=self.url, api_key="none", timeout=600, max_retries=0)

    def stop(self) -> None:
        """Stop it, and wait for its end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def start(mode: str, port: int, options: Sequence[str], log: Path) -> Served:
    """Start a server, which traces beside its `log`, and wait until it is ready. Raises RuntimeError if it dies
    first."""
    options = ["--trace", str(log.with_suffix(".jsonl")), *options]
    with log.open("wb") as file:
        command = [sys.executable, "-m", "flare", "run", "--port", str(port), "--speculative", mode, *options]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "NO_COLOR": "1"})
    served = Served(process, f"http://127.0.0.1:{port}/v1")
    while process.poll() is None:
        try:
            served.model = asyncio.run(_ready(served))
            return served
        except (openai.APIError, OSError):
            time.sleep(0.3)
    raise RuntimeError(f"the server of mode {mode} ended; see {log}")


async def _ready(served: Served) -> str:
    """The name of its model, once it answers."""
    async with served.client() as client:
        name = (await client.models.list()).data[0].id
        await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=2, temperature=0
        )
        return name


async def run(served: Served, prompts: Sequence[str], streams: int, tokens: int, temperature: float) -> float:
    """Output tokens per second of `streams` clients that send `prompts` in turn."""
    waiting = iter(prompts)
    count = 0
    async with served.client() as client:

        async def one() -> None:
            nonlocal count
            for index, prompt in enumerate(waiting):
                events = await client.chat.completions.create(
                    model=served.model,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=index,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for event in events:
                    count += event.usage.completion_tokens if event.usage else 0

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(streams)))
        return count / (time.perf_counter() - began)


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, to 1% from five degrees of freedom on (Fisher and Cornish, 1960)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """The mean ratio and its 95% interval, of log ratios."""
    mean = statistics.fmean(logs)
    half = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(
    off: Served, on: Served, task: str, mode: str, streams: int, *, tokens: int, temperature: float, width: float,
    pairs_max: int, seconds_max: float,
) -> Cell:  # fmt: skip
    """Pairs of runs until the interval is within `width` of the ratio on either side, or there were too many."""
    offs: list[float] = []
    ons: list[float] = []
    logs: list[float] = []
    began = time.monotonic()
    prompts = TASKS[task]
    for served in (off, on):  # both learn their durations first
        asyncio.run(run(served, prompts[: 2 * streams], streams, tokens, temperature))
    each = max(2 * streams, 4)
    while True:
        first = len(logs) * each % len(prompts)
        chosen = (prompts * 4)[first : first + each]
        order = (off, on) if len(logs) % 2 == 0 else (on, off)
        speeds = {
            served.process.pid: asyncio.run(run(served, chosen, streams, tokens, temperature)) for served in order
        }
        offs.append(speeds[off.process.pid])
        ons.append(speeds[on.process.pid])
        logs.append(math.log(ons[-1] / offs[-1]))
        if len(logs) < PAIRS_MIN:
            continue
        ratio, low, high = interval(logs)
        narrow = high / ratio - 1 <= width
        if narrow or len(logs) >= pairs_max or time.monotonic() - began > seconds_max:
            return Cell(
                task, mode, streams, len(logs), statistics.median(offs), statistics.median(ons), ratio, low, high
            )


def plans_of(trace: Path) -> tuple[int, set[str]]:
    """How many plans a server committed, and those of their graphs that it had not prepared."""
    prepared, planned = set[str](), list[str]()
    with trace.open() as lines:
        for event in map(json.loads, lines):
            if event["event"] == "graph.prepared":
                prepared.add(event["graph"])
            elif event["event"] == "plan.committed":
                planned.append(event["shape"])
    return len(planned), set(planned) - prepared


def show(cells: Sequence[Cell], console: Console) -> None:
    """The table of all cells."""
    table = Table("task", "mode", "streams", "pairs", "off tok/s", "on tok/s", "ratio", "95% interval")
    for cell in cells:
        table.add_row(
            cell.task,
            cell.mode,
            str(cell.streams),
            str(cell.pairs),
            f"{cell.off:.1f}",
            f"{cell.on:.1f}",
            f"{cell.ratio:.3f}",
            f"{cell.low:.3f} to {cell.high:.3f}",
        )
    console.print(table)


def main(
    streams: Annotated[list[int] | None, typer.Option(help="Clients at once. May be repeated. [1, 4, 8]")] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TASKS)}. May be repeated.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="As of --speculative. May be repeated. [adaptive]")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Given to every server as it is, as --dtype=auto.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    width: Annotated[float, typer.Option(help="Half of the interval that is narrow enough.")] = 0.03,
    pairs_max: Annotated[int, typer.Option(min=PAIRS_MIN)] = 40,
    seconds_max: Annotated[float, typer.Option(help="Of one cell.")] = 180,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all cells to this file.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder of the servers' logs.")] = Path(),
) -> None:
    """Compare tokens per second with speculation and without."""
    console = Console()
    cells: list[Cell] = []
    options = option or []
    with ExitStack() as stack:
        servers = {}
        for index, name in enumerate([OFF, *(mode or ["adaptive"])]):
            servers[name] = start(name, FIRST_PORT + index, options, _log(logs, name))
            stack.callback(servers[name].stop)
        for kind in task or list(TASKS):
            for count in streams or [1, 4, 8]:
                for name in mode or ["adaptive"]:
                    cells.append(
                        compare(
                            servers[OFF],
                            servers[name],
                            kind,
                            name,
                            count,
                            tokens=tokens,
                            temperature=temperature,
                            width=width,
                            pairs_max=pairs_max,
                            seconds_max=seconds_max,
                        )
                    )
                    show(cells[-1:], console)
                    if json_file is not None:
                        json_file.write_text(json.dumps(msgspec.to_builtins(cells), indent=1))
    show(cells, console)
    for name in servers:
        count, unprepared = plans_of(_log(logs, name).with_suffix(".jsonl"))
        console.print(f"{name}: {count} plans, of graphs that were not prepared: {sorted(unprepared) or 'none'}")


def _log(folder: Path, mode: str) -> Path:
    return folder / f"server-{mode.replace(':', '-')}.log"


if __name__ == "__main__":
    typer.run(main)
