"""`flare simulate` on the command line.

Owns the options and how results are printed. Does not own what is simulated. Surprising rule: each policy is run at
each speed, so that two lists make a table of all pairs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from msgspec import UNSET, UnsetType
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flare.config.schema import REQUEST_SLOTS_MAX
from flare.failure import show_error

from .cells import CLOSED_LOOP, TWO_CLIENTS, Cell, Result, check
from .figures import Slo, parse_slo
from .outputs import try_file, try_folder, writing
from .pool import OnShare, run_cells
from .report import table
from .speculation import Speculation, parse_acceptance
from .traces import Half

_WIDTH = 140
"""Columns where there is no terminal to ask."""

Draw = Callable[[Sequence[Result], Path, str], list[Path]]

_POLICIES = (
    "A preset or a policy file; or a rule: vllm:TOKENS, sarathi:TOKENS, prefill-first:TOKENS, vtc, fastserve; or one "
    "that speculates: static:K, turbospec:K, vllm-table, vllm-adaptive:K. May be repeated. [balanced]"
)
_STREAMS = "Streams of the closed loop, each of which asks anew when it has been answered: N or N,N,..."

_RecipeOption = Annotated[
    str | None,
    typer.Option(help="The graphs of the simulated device: a name or a file. [sim, or sim_speculative]"),
]
_Mode = Annotated[str | None, typer.Option(help="Flare's graphs: off, adaptive or fixed:W, W target positions a row.")]
_TargetRows = Annotated[int | None, typer.Option(min=1, help="Target positions of one graph, at most. [256]")]
_DraftCosts = Annotated[Path | None, typer.Option(help="JSON table whose decode steps are the draft's. [free]")]
_Acceptance = Annotated[
    str | None, typer.Option(help="How likely a proposal is right, by request: P or LOW-HIGH. [0.6-0.8]")
]
_Insight = Annotated[
    float | None, typer.Option(min=0, max=1, help="What the draft sees of that; it then allocates rows.")
]


def simulate(
    trace: Annotated[str, typer.Option(help=f"CSV or JSON lines of requests, or {TWO_CLIENTS}, {CLOSED_LOOP}.")],
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
    recipe: _RecipeOption = None,
    streams: Annotated[str | None, typer.Option(help=_STREAMS)] = None,
    warmup: Annotated[float | None, typer.Option(min=0, help="Seconds at first that are in no figure.")] = None,
    speculative: _Mode = None,
    speculative_token_capacity: _TargetRows = None,
    draft_costs: _DraftCosts = None,
    acceptance: _Acceptance = None,
    insight: _Insight = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [one for each core]")] = None,
    results: Annotated[Path | None, typer.Option(help="JSON lines; finished runs in it are not run again.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Draw into this folder (needs the extra `plots`).")] = None,
    plot_format: Annotated[Literal["svg", "png"], typer.Option()] = "svg",
) -> None:
    """Serve a trace in virtual time, by Flare's own scheduler and by other servers' rules."""
    speculation = _speculation(speculative, speculative_token_capacity, draft_costs, acceptance, insight)
    speculates = speculation is not UNSET and speculation.mode != "off"
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
        recipe=recipe or ("sim_speculative" if speculates else "sim"),
        drain=drain,
        half=half or UNSET,
        warmup_s=UNSET if warmup is None else warmup,
        speculation=speculation,
    )
    cells = _cells(base, policy or ["balanced"], speed or [1.0], _streams(streams))
    draw = None if plots is None else _drawing()
    try:
        try_file("--results", results)
        try_file("--json", json_file)
        try_folder("--plots", plots)
        check(cells)
        _show(run_with_bar(cells, jobs or len(os.sched_getaffinity(0)), results), json_file, draw, plots, plot_format)
    except (OSError, ValueError) as error:
        show_error(error)
        raise typer.Exit(2) from None


def _cells(
    base: Cell, policies: Sequence[str], speeds: Sequence[float], streams: Sequence[int | UnsetType]
) -> list[Cell]:
    """One cell for each policy at each speed and number of streams."""
    return [
        msgspec.structs.replace(base, policy=name, speed=times, streams=count)
        for times in speeds
        for count in streams
        for name in policies
    ]


def _show(
    found: Sequence[Result], json_file: Path | None, draw: Draw | None, plots: Path | None, plot_format: str
) -> None:
    """Print the table of all results, and write what was asked for. Raises OSError."""
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


def _streams(text: str | None) -> list[int | UnsetType]:
    """The values of `--streams`. Raises `typer.BadParameter`."""
    if text is None:
        return [UNSET]
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise typer.BadParameter(f"--streams {text:.40}: give one whole number or several, as 1,8,64")
    return [int(count) for count in text.split(",")]


def _speculation(
    mode: str | None, target_rows: int | None, draft_costs: Path | None, acceptance: str | None, insight: float | None
) -> Speculation | UnsetType:
    """What the options say of speculation; unset if they say nothing. Raises `typer.BadParameter`."""
    given: dict[str, object] = {
        "mode": mode,
        "target_rows": target_rows,
        "draft_costs": None if draft_costs is None else str(draft_costs),
        "insight": insight,
    }
    told = {key: value for key, value in given.items() if value is not None}
    try:
        if acceptance is not None:
            told["acceptance"] = parse_acceptance(acceptance)
        return msgspec.convert(told, Speculation) if told else UNSET
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


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
