"""`flare bench` on the command line.

Owns the options and how results are printed. Does not own what is measured. Surprising rule: it exits with 1 when any
request failed, so that a script cannot take a broken run for a slow one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from flare.client import base_url
from flare.failure import show_error

from .http import Server
from .runs import SUITE, BenchError, Case, Result, open_bench
from .stats import MixedSummary, Spread, Summary
from .stream import Ask

_WIDTH = 120
"""Columns where there is no terminal to ask."""
_CHUNKS_PER_TOKEN_MIN = 0.95
"""Below this, gaps are not the times between tokens, and the report says so."""


def bench(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    streams: Annotated[int | None, typer.Option(min=1, help="Clients. [default: 1; with --mixed 4]")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a run. [default: 4 a stream]")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for all output tokens, whatever the model says.")] = True,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: requests/s, Poisson.")] = None,
    mixed: Annotated[bool, typer.Option("--mixed", help="Running streams, and long prompts among them.")] = False,
    long_prompt_tokens: Annotated[int, typer.Option(min=1, help="Of --mixed.")] = 1500,
    every: Annotated[float, typer.Option(min=0.01, help="Of --mixed: seconds between long prompts.")] = 3.0,
    long_count: Annotated[int, typer.Option(min=1, help="Of --mixed.")] = 8,
    alone: Annotated[float, typer.Option(min=0.1, help="Of --mixed: seconds of the streams by themselves.")] = 10.0,
    suite: Annotated[bool, typer.Option("--suite", help="The whole table of docs/benchmarks.md.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Runs; the median one is reported.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
    model: Annotated[str, typer.Option(help="[default: the first that the server lists]")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option()] = "completions",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the prompts and of Poisson arrivals.")] = 0,
) -> None:
    """Put load on an OpenAI-compatible server and report what its clients see."""
    if mixed and rate is not None:
        raise typer.BadParameter("--mixed and --rate are different loads; choose one")
    case = Case(
        kind="mixed" if mixed else "closed" if rate is None else "open",
        streams=streams or (4 if mixed else 1),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rate=rate or 0.0,
        long_prompt_tokens=long_prompt_tokens,
        long_count=long_count,
        every_s=every,
        alone_s=alone,
    )
    ask = Ask(model, output_tokens, ignore_eos, endpoint)
    if json_file is not None:
        _check_writable(json_file)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    try:
        server = Server(base_url(url), api_key, timeout)
        results = uvloop.run(_measure(console, server, ask, SUITE if suite else (case,), repeat, seed))
    except (BenchError, ValueError) as error:
        show_error(error)
        raise typer.Exit(2) from error
    show(console, results)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    if any(run.failed for result in results for run in result.runs):
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Before the load, so that no measurement is lost. Raises `typer.BadParameter`."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise typer.BadParameter(f"--json {path}: {error.strerror}") from None


async def _measure(
    console: Console, server: Server, ask: Ask, cases: Iterable[Case], repeat: int, seed: int
) -> list[Result]:
    plan = await open_bench(server, ask, seed)
    if not plan.maker.sized_by_server:
        console.print("The server has no /tokenize: prompts have about as many words as tokens were asked for.")
    with console.status("") as status:
        return [await plan.measure(case, repeat, status.update) for case in cases]


def show(console: Console, results: Iterable[Result]) -> None:
    """Print the results as tables, and every error."""
    results = list(results)
    plain = [(result.name, result.median) for result in results if isinstance(result.median, Summary)]
    if plain:
        table = _table("", "output tok/s", "TTFT p50", "p99", "gap p50", "p99", "max", "requests", "failed")
        for name, run in plain:
            table.add_row(name, *_summary_cells(run))
        console.print(table)
    crowded = [(result.name, result.median) for result in results if isinstance(result.median, MixedSummary)]
    if crowded:
        table = _table("", "alone tok/s", "tok/s", "gap p50", "p99", "max", "long TTFT p50", "max", "failed")
        for name, mixed_run in crowded:
            table.add_row(name, *_mixed_cells(mixed_run))
        console.print(table)
    for name, run in plain:
        if run.chunks < _CHUNKS_PER_TOKEN_MIN * run.output_tokens:
            console.print(f"{name}: {run.output_tokens} tokens came in {run.chunks} chunks.", highlight=False)
    if any(not run.counted_by_usage for _, run in plain):
        console.print("The server reports no usage: tokens are counted by chunks.")
    for result in results:
        for error, count in (pair for run in result.runs for pair in run.errors.items()):
            console.print(f"{result.name}: {count} times: {error}", style="red", markup=False)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption="times in ms")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def _summary_cells(run: Summary) -> Iterator[str]:
    yield f"{run.output_tokens_per_s:.1f}"
    yield from (_ms(run.first_token_ms.p50), _ms(run.first_token_ms.p99))
    yield from _spread_cells(run.gap_ms)
    yield from (str(run.requests), str(run.failed))


def _mixed_cells(run: MixedSummary) -> Iterator[str]:
    yield from (f"{run.alone_tokens_per_s:.1f}", f"{run.stream_tokens_per_s:.1f}")
    yield from _spread_cells(run.gap_ms)
    yield from (_ms(run.long_first_token_ms.p50), _ms(run.long_first_token_ms.max))
    yield str(run.failed)


def _spread_cells(spread: Spread) -> Iterator[str]:
    yield from (_ms(spread.p50), _ms(spread.p99), _ms(spread.max))


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
