"""`flare tune` on the command line.

Owns the options, the evidence in the preset's comments, and what is printed. Does not own the search. Surprising rule:
everything that can be wrong with the options is found before the first simulation, the output included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec import UNSET

from flare.config.loader import load_policy
from flare.config.schema import REQUEST_SLOTS_MAX
from flare.failure import show_error
from flare.simulate.cells import TWO_CLIENTS, Cell, Result, check
from flare.simulate.command import output_console, progress_bar, slo_option
from flare.simulate.outputs import try_file, writing
from flare.simulate.report import table
from flare.simulate.traces import Half

from .preset import toml
from .search import Score, Trial, best, search, simulated


def tune(
    trace: Annotated[str, typer.Option(help=f"CSV or JSON lines of requests, or {TWO_CLIENTS}.")],
    costs: Annotated[Path, typer.Option(help="JSON table of what graphs cost.")],
    slo: Annotated[
        str, typer.Option(help="What is good: first token and p99 of a request's gaps, ms: ttft=1000,itl=50.")
    ],
    output: Annotated[Path, typer.Option(help="The preset that is written, a .toml file.")],
    base: Annotated[str, typer.Option(help="The preset or policy file at which the search begins.")] = "balanced",
    speed: Annotated[list[float] | None, typer.Option(help="Divides arrival times. May be repeated. [1]")] = None,
    half: Annotated[Half | None, typer.Option(help="Tune on one half of the trace; the other can judge.")] = None,
    window: Annotated[float | None, typer.Option(min=0.001, help="Seconds in which requests arrive. [all]")] = None,
    trials: Annotated[int, typer.Option(min=2, help="Policies that are simulated, the base among them.")] = 60,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. [one for each core]")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the search, and of the starts of sessions.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=REQUEST_SLOTS_MAX, help="Requests that run at once.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=16, help="Tokens that the KV cache holds.")] = 430_000,
    recipe: Annotated[str, typer.Option(help="The graphs of the simulated device: a name or a file.")] = "sim",
) -> None:
    """Search the coefficients of a policy by simulation, and write the best as a preset."""
    load = Cell(
        policy=base,
        trace=trace,
        costs=str(costs),
        window_s=window,
        seed=seed,
        slo=slo_option(slo),
        slots=slots,
        kv_tokens=kv_tokens,
        recipe=recipe,
        half=half or UNSET,
    )
    loads = [msgspec.structs.replace(load, speed=each) for each in speed or [1.0]]
    try:
        if output.suffix != ".toml":
            raise ValueError(f"--output: {output}: must be a name that ends in .toml, such as mine.toml")
        try_file("--output", output)
        policy = load_policy(base)
        check(loads)
        evaluate = simulated(loads, jobs or len(os.sched_getaffinity(0)))
        with progress_bar("tuning", "policies", trials) as progress:
            found = search(policy, evaluate, trials=trials, seed=seed, progress=progress)
        with writing("--output", output):
            output.write_text(toml(best(found).policy, _evidence(found, loads, seed)), encoding="utf-8")
    except (OSError, ValueError) as error:
        show_error(error)
        raise typer.Exit(2) from None
    console = output_console()
    shown = [(base, found[0]), (output.stem, best(found))]
    console.print(table(_named(result, name) for name, trial in shown for result in trial.results))
    if best(found) is found[0]:
        console.print(f"nothing was better than {base}; others tried: {trials - 1}", highlight=False)
    console.print(f"wrote {output}", highlight=False)


def _named(result: Result, name: str) -> Result:
    return msgspec.structs.replace(result, cell=msgspec.structs.replace(result.cell, policy=name))


def _evidence(trials: Sequence[Trial], loads: Sequence[Cell], seed: int) -> list[str]:
    """What the preset rests on, a paragraph an entry."""
    load = loads[0]
    half = "all of it" if load.half is UNSET else f"its {load.half} half"
    window = "all requests" if load.window_s is None else f"requests of {load.window_s:g} s"
    speeds = ", ".join(f"{each.speed:g}" for each in loads)
    chosen = best(trials)
    place = next(place for place, trial in enumerate(trials) if trial is chosen)
    return [
        'Written by flare tune; docs/simulation.md, "Tuning", says how it searches.',
        f"Trace: {Path(load.trace).name}, {half}, {window}, speed {speeds}.",
        f"Costs: {Path(load.costs).name}; recipe {load.recipe}, {load.slots} slots, {load.kv_tokens} KV tokens.",
        f"Good: first token within {load.slo.ttft_ms:g} ms, p99 of gaps within {load.slo.itl_ms:g} ms.",
        f"Search: seed {seed}, {len(trials)} policies; this is number {place} (0 is the base, {load.policy}).",
        f"Base: {_told(trials[0].score)}.",
        f"This: {_told(chosen.score)}.",
    ]


def _told(score: Score) -> str:
    return f"{score.good:.1%} good, {score.output_tokens_per_s:,.0f} tok/s, median first token {score.ttft_ms:,.0f} ms"
