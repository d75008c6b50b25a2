"""`flare simulate` on the command line.

Owns the options and how results are printed. Does not own what is simulated. Surprising rule: each policy is run at
each speed, so that two lists make a table of all pairs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from msgspec import UNSET
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flare.config.schema import REQUEST_SLOTS_MAX
from flare.failure import show_error

from .cells import TWO_CLIENTS, Cell, Result, check
from .figures import Slo, parse_slo
from .outputs import try_file, try_folder, writing
from .pool import OnShare, run_cells
from .report import table
from .traces import Half

_WIDTH = 140
"""Columns where there is no terminal to ask."""

Draw = Callable[[Sequence[Result], Path, str], list[Path]]

_POLICIES = (
    "A preset or a policy file; or a rule: vllm:TOKENS, sarathi:TOKENS, prefill-first:TOKENS, vtc, fastserve. "
    "May be repeated. [balanced]"
)


def simulate(
    trace: Annotated[str, typer.Option(help=f"CSV or JSON lines of requests, or {TWO_CLIENTS}.")],
    costs: Annotated[Path, typer.Option(help="JSON table of what graphs cost.")],
    policy: Annotated[list[str] | None, typer.Option(help=_POLICIES)] = None,
    speed: Annotated[list[float] | None, typer.Option(help="Divides arrival times. May be repeated. [1]")] = None,
    slots: Annotated[int, typer.Option(min=1, max=REQUEST_SLOTS_MAX, help="Requests that run at once.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens that the KV cache holds.")] = 430_000,
    window: Annotated[float | None, typer.Option(min=0.001, help="Seconds in which requests arrive. [all]")] = None,
    half: Annotated[Half | None, typer.Option(help="Take one half of the trace, by time.")] = None,
    drain: Annotated[bool, typer.Option(help="Work off what has arrived by the end of the window.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of noise, and of the starts of sessions.")] = 0,
    noise: Annotated[float, typer.Option(min=0, max=0.57, help="Coefficient of variation of durations.")] = 0.0,
    slo: Annotated[str, typer.Option(help="What is good: first token and p99 of a request's gaps, ms.")] = (
        "ttft=1000,itl=50"
    ),
    recipe: Annotated[str, typer.Option(help="The graphs of the simulated device: a name or a file.")] = "sim",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [one for each core]")] = None,
    results: Annotated[Path | None, typer.Option(help="JSON lines; finished runs in it are not run again.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw into this folder (needs the extra `plots`).")] = None,
    plot_format: Annotated[Literal["svg", "png"], typer.Option()] = "svg",
) -> None:
    """Serve a trace in virtual time, by Flare's own scheduler and by other servers' rules."""
    base = Cell(
        policy="",
        trace=trace,
        costs=str(costs),
        slots=slots,
        kv_tokens=kv_tokens,
        window_s=window,
        seed=seed,
        noise=noise,
        slo=slo_option(slo),
        recipe=recipe,
        drain=drain,
        half=half or UNSET,
    )
    cells = [
        msgspec.structs.replace(base, policy=name, speed=times)
        for times in speed or [1.0]
        for name in policy or ["balanced"]
    ]
    draw = None if plots is None else _drawing()
    try:
        try_file("--results", results)
        try_file("--json", json_file)
        try_folder("--plots", plots)
        check(cells)
        found = run_with_bar(cells, jobs or len(os.sched_getaffinity(0)), results)
        console = output_console()
        console.print(table(found))
        if json_file is not None:
            with writing("--json", json_file):
                json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        if draw is not None and plots is not None:
            with writing("--plots", plots):
                drawn = draw(found, plots, plot_format)
            for path in drawn:
                console.print(f"wrote {path}", highlight=False)
    except (OSError, ValueError) as error:
        show_error(error)
        raise typer.Exit(2) from None


def output_console() -> Console:
    """Standard output for tables, of a fixed width where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, emoji=False)


def slo_option(text: str) -> Slo:
    """The value of `--slo`. Raises `typer.BadParameter`."""
    try:
        return parse_slo(text)
    except ValueError as error:
        raise typer.BadParameter(f"--slo: {error}") from None


def run_with_bar(cells: Sequence[Cell], jobs: int, results: Path | None) -> list[Result]:
    """Run cells under a progress bar, where there is a terminal. Raises what `run_cells` raises."""
    with progress_bar("simulating", "runs", len(cells)) as progress:
        return run_cells(cells, jobs, results, progress)


@contextmanager
def progress_bar(what: str, unit: str, total: int) -> Iterator[OnShare]:
    """A bar on standard error, where that is a terminal; called with how many of `total` units are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:.1f}}/{{task.total:.0f}} {unit}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=total)
        yield lambda done: bars.update(task, completed=done)


def _drawing() -> Draw:
    """The function that draws. Raises `typer.BadParameter` where its library is not installed."""
    try:
        draw: Draw = import_module("flare.simulate.plots").draw
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"--plots: {error.name} is not installed; pip install 'flare-serve[plots]'") from None
    return draw
