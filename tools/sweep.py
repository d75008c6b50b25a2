"""The comparison of docs/simulation_results.md: `python -m tools.sweep --traces FOLDER --results FILE`.

Owns which traces, devices, loads and policies are compared, how the load that saturates a server is found, and the
document that shows the outcome. Does not own a run (`flare.simulate`). Surprising rule: everything goes through the
results file, the search for saturation too, so that an interrupted sweep goes on, and one that is complete only writes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from flare.failure import show_error
from flare.simulate.cells import Cell, Result, check
from flare.simulate.command import run_with_bar
from flare.simulate.figures import Slo
from flare.simulate.outputs import try_file, try_folder
from flare.simulate.plots import draw
from flare.simulate.report import HEADINGS, cells_of, markdown
from flare.simulate.traces import read_trace

LOADS = (0.3, 0.7, 1.0)
"""Shares of the saturating speed."""

BUDGETS = (512, 1024, 2048)
BUDGET_RULES = ("vllm", "sarathi")
UNEQUAL = "fastserve:1024"
"""A rule with more request state than the others, shown beside them and never a cell's best."""

OTHERS = ("prefill-first:8192", "vtc", "fastserve", UNEQUAL)
OURS = ("balanced", "throughput", "interactive")
REFERENCE = "vllm:2048"
"""The rule whose output rate says where a server is saturated."""

_STEP = 1.15
_SPEEDS = tuple(round(0.25 * _STEP**step, 4) for step in range(34))
"""Where saturation is looked for: 0.25 to 25 times a trace's own speed."""

_ELASTICITY = 0.25
"""A rate no longer rises where a faster load brings less than this share of its own rise."""


class Load(NamedTuple):
    """A trace on a device, and what counts as good there."""

    trace: str
    costs: str
    slo: Slo

    @property
    def name(self) -> str:
        """For headings and file names, such as `azure2023_conv h100`."""
        return f"{Path(self.trace).stem} {Path(self.costs).stem.removeprefix('graph_costs_').partition('_')[0]}"


TRACES = ("azure2023_conv.csv", "azure2023_code.csv", "vtc_arena_27clients.csv", "servegen_m-large_synth.csv")
DEVICES = {"graph_costs_h100_llama-3-8b.json": 50.0, "graph_costs_a100_llama-3-8b.json": 100.0}
"""Tables of costs, and the gap (ms) within which the 99th percentile of a good request's gaps stays there."""


class Sweep:
    """One comparison. `window_s` bounds each run; a trace that is over sooner ends it sooner."""

    def __init__(self, folder: Path, results: Path, window_s: float, jobs: int, policies: Sequence[str]) -> None:
        self.folder = folder
        self._results = results
        self._window_s = window_s
        self._jobs = jobs
        self.policies = policies
        traces = {name: read_trace(folder / name) for name in TRACES}
        self._spans = {name: trace[-1].arrival_s for name, trace in traces.items()}

    def loads(self, traces: Iterable[str], devices: Iterable[str]) -> list[Load]:
        """The traces on the devices."""
        return [Load(trace, costs, Slo(1000.0, DEVICES[costs])) for trace in traces for costs in devices]

    def cell(self, load: Load, policy: str, speed: float) -> Cell:
        """One run."""
        return Cell(
            policy=policy,
            trace=str(self.folder / load.trace),
            costs=str(self.folder / load.costs),
            speed=round(speed, 4),
            window_s=min(self._window_s, self._spans[load.trace] / speed),
            slo=load.slo,
        )

    def check(self, loads: Sequence[Load]) -> None:
        """Raises what would else come up in the middle: what `check` of cells raises, and ValueError for a file."""
        try_file("--results", self._results)
        check([self.cell(load, REFERENCE, _SPEEDS[0]) for load in loads])
        check([self.cell(loads[0], policy, _SPEEDS[0]) for policy in self.policies])

    def run(self, cells: Sequence[Cell]) -> list[Result]:
        """Results of cells, from the file where it has them."""
        return run_with_bar(cells, self._jobs, self._results)

    def saturation(self, load: Load) -> float:
        """The speed at which the reference rule's output rate stops rising."""
        cells = [self.cell(load, REFERENCE, speed) for speed in _SPEEDS]
        found = self.run([msgspec.structs.replace(cell, drain=False) for cell in cells])
        return knee(_SPEEDS, [result.figures.output_tokens_per_s for result in found])


def knee(speeds: Sequence[float], rates: Sequence[float]) -> float:
    """The least of the rising `speeds` after which the greatest rate so far rises, from each to the next, by less than
    a quarter of what the speed does."""
    best = list(itertools.accumulate(rates, max))
    place = len(speeds) - 1
    while (
        place > 0
        and best[place - 1] > 0
        and best[place] / best[place - 1] - 1 < _ELASTICITY * (speeds[place] / speeds[place - 1] - 1)
    ):
        place -= 1
    return speeds[place]


def saturated(speed: float) -> str:
    """What is said of the speed that was found."""
    if speed == _SPEEDS[-1]:
        return f"not saturated at {speed:g} times the trace's speed, the greatest that was tried"
    return f"saturated at {speed:g} times the trace's speed"


def policies_of(ours: Sequence[str]) -> list[str]:
    """Every rule with each of its budgets, then our policies."""
    budgets = [f"{rule}:{budget}" for rule, budget in itertools.product(BUDGET_RULES, BUDGETS)]
    return [*budgets, *OTHERS, *ours]


def summary(results: Sequence[tuple[str, Sequence[Result]]], policies: Sequence[str]) -> str:
    """The share of good requests, a row for each cell, with the average and the worst distance to a cell's best."""
    goods = {name: {result.cell.policy: 100 * result.figures.good for result in found} for name, found in results}
    rows = [[name, *(f"{row[policy]:.1f}" for policy in policies)] for name, row in goods.items()]
    count = len(goods)
    means = [sum(row[policy] for row in goods.values()) / count for policy in policies]
    bests = {name: max(good for policy, good in row.items() if policy != UNEQUAL) for name, row in goods.items()}
    behind = [max(bests[name] - row[policy] for name, row in goods.items()) for policy in policies]
    rows.append(["**average**", *(f"**{mean:.1f}**" for mean in means)])
    rows.append(["furthest behind the cell's best", *(f"{value:.1f}" for value in behind)])
    return markdown(["trace, device, load", *policies], rows)


def shown(found: Sequence[Result]) -> list[Result]:
    """What a detailed table and a plot show: of each rule with budgets only the best one in the cell."""
    best: list[Result] = []
    for rule in BUDGET_RULES:
        of_rule = [result for result in found if result.cell.policy.startswith(f"{rule}:")]
        best.append(max(of_rule, key=lambda result: result.figures.good))
    return [*best, *(result for result in found if not result.cell.policy.startswith(BUDGET_RULES))]


def write(
    out: Path, by_load: Sequence[tuple[Load, float, Sequence[Sequence[Result]]]], policies: Sequence[str]
) -> None:
    """The document, and a plot for each trace and device."""
    cells = [
        (f"{load.name}, {share:g}", found)
        for load, _, loads in by_load
        for share, found in zip(LOADS, loads, strict=True)
    ]
    parts = [_HEAD, summary(cells, policies)]
    for load, speed, loads in by_load:
        name = load.name.replace(" ", "_")
        flat = [result for found in loads for result in found]
        for path in draw(_renamed(flat), out / "plots" / name, "svg"):
            if path.stem == "latency":
                path.rename(out / "plots" / f"{name}.svg")
            else:
                path.unlink()
        (out / "plots" / name).rmdir()
        parts.append(
            f"\n## {load.name}\n\n{saturated(speed).capitalize()}; good: first token within "
            f"{load.slo.ttft_ms:g} ms and p99 of gaps within {load.slo.itl_ms:g} ms.\n\n![{load.name}]"
            f"(plots/{name}.svg)\n\n"
        )
        parts.append(markdown(HEADINGS[:-1], [cells_of(result)[:-1] for found in loads for result in shown(found)]))
    (out / "simulation_results.md").write_text("".join(parts), encoding="utf-8")


def _renamed(results: Iterable[Result]) -> list[Result]:
    """For plots: the best budget of each rule at each speed, under the rule's name."""
    chosen = []
    for _, group in itertools.groupby(results, key=lambda result: result.cell.speed):
        for result in shown(list(group)):
            name = result.cell.policy.partition(":")[0]
            chosen.append(msgspec.structs.replace(result, cell=msgspec.structs.replace(result.cell, policy=name)))
    return chosen


_HEAD = """# Simulated comparison

Written by `python -m tools.sweep`; [simulation.md](simulation.md) says what is simulated and what the figures mean.
Each load is a share of the saturating speed, where the output rate of vLLM's rule with 2,048 tokens stops rising: the
trace then asks for as much output per second as that rule gives at any speed. Detailed
tables and plots show budget rules with the best of 512, 1,024 and 2,048 tokens for each load; requests have 64 slots
and 430,000 tokens of KV cache. `fastserve:1024` may hold the caches of that many requests where the others have slots
for 64; it is in no comparison with the best rule.

## Share of good requests, %

"""


def main() -> None:
    """Run what is missing, then write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of traces and tables of costs")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; finished runs are not run again")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the document and its plots")
    parser.add_argument("--window", type=float, default=120.0, help="seconds in which requests arrive, at most")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--policy", action="append", help="ours to compare; default: all presets")
    parser.add_argument("--only", default="", help="traces whose name holds this")
    parser.add_argument("--saturation-only", action="store_true", help="find the saturating speeds, and stop")
    arguments = parser.parse_args()
    traces = [trace for trace in TRACES if arguments.only in trace]
    if not traces:
        parser.error(f"--only {arguments.only}: no trace has that in its name; they are {', '.join(TRACES)}")
    if arguments.jobs < 1:
        parser.error("--jobs: must be at least 1")
    try:
        compare(arguments, traces)
    except (OSError, ValueError) as error:
        show_error(error)
        sys.exit(2)


def compare(arguments: argparse.Namespace, traces: Sequence[str]) -> None:
    """Run and write what was asked for. Raises OSError or ValueError."""
    policies = policies_of(arguments.policy or OURS)
    sweep = Sweep(arguments.traces, arguments.results, arguments.window, arguments.jobs, policies)
    loads = sweep.loads(traces, DEVICES)
    sweep.check(loads)
    if not arguments.saturation_only:
        try_folder("--out", arguments.out)
    speeds = {load: sweep.saturation(load) for load in loads}
    for load, speed in speeds.items():
        print(f"{load.name}: {saturated(speed)}", flush=True)
    if arguments.saturation_only:
        return
    cells = [
        [sweep.cell(load, policy, share * speeds[load]) for policy in policies] for load in loads for share in LOADS
    ]
    sweep.run([cell for group in cells for cell in group])
    found = [sweep.run(group) for group in cells]
    grouped = [found[place : place + len(LOADS)] for place in range(0, len(found), len(LOADS))]
    by_load = [(load, speeds[load], group) for load, group in zip(loads, grouped, strict=True)]
    write(arguments.out, by_load, policies)


if __name__ == "__main__":
    main()
