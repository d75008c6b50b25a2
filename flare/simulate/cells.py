"""Cells: one policy on one load.

Owns what a cell is, how it is run and how it is told from others. Does not own processes or results (`pool`).
Surprising rule: a cell's key holds the contents of its files and of its policy, so that a changed file is another cell;
it does not hold this program's version, so results are to be dropped when the program has changed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flare.config.convert import checked_table
from flare.config.loader import flag_of, load_policy, load_recipe
from flare.config.schema import REQUEST_SLOTS_MAX, ConfigError, Policy
from flare.graphs.catalog import build_catalog, padded_concurrency
from flare.graphs.sim.costs import CostTable, load_costs
from flare.graphs.sim.tokens import mix
from flare.machines.graph import GraphShape

from .arrivals import Arrivals, ClosedLoop, OpenLoop
from .figures import Figures, Slo, measure
from .iteration import simulate
from .outcome import NS_PER_S, OnProgress, Outcome
from .rules.by_name import canonical, is_rule, make_rule, speculates
from .serving import VirtualServer
from .speculation import NO_PROPOSER, Speculation, proposer_of
from .traces import Half, TraceError, TraceRequest, half_of, load, read_trace, two_clients

TWO_CLIENTS = "two-clients"
"""The trace that needs no file: the overload by two clients of docs/simulation.md, "Fairness"."""

CLOSED_LOOP = "closed-loop"
"""The load that needs none either: streams that ask anew when they have been answered."""

_NO_FILE = (TWO_CLIENTS, CLOSED_LOOP)

WINDOW_LEAST_S = 0.001
"""A window of less, as requests that all come at once have, tells no rate."""

_TWO_CLIENTS_S = 360.0
_TWO_CLIENTS_RATES = (1.5, 3.0)
_TWO_CLIENTS_TOKENS = 256


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run. `policy` is a rule, a preset or a file; `trace` and `costs` are paths. `noise` is the
    coefficient of variation of every duration. `drain`: what arrived in the window is worked off after it. Without
    `half` the trace is taken whole. `streams` are those of the closed loop, which ends with its window, and what is
    before `warmup_s` is in no figure. Without `speculation` nothing is proposed."""

    policy: str
    trace: str
    costs: str
    speed: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    slots: Annotated[int, Meta(ge=1, le=REQUEST_SLOTS_MAX)] = 64
    kv_tokens: Annotated[int, Meta(ge=16, le=100_000_000)] = 430_000
    window_s: Annotated[float, Meta(ge=WINDOW_LEAST_S, le=1e7)] | None = None
    seed: Annotated[int, Meta(ge=0)] = 0
    noise: Annotated[float, Meta(ge=0, le=0.57)] = 0.0
    slo: Slo = Slo()
    recipe: str = "sim"
    drain: bool = True
    half: Half | UnsetType = UNSET
    streams: Annotated[int, Meta(ge=1, le=REQUEST_SLOTS_MAX)] | UnsetType = UNSET
    warmup_s: Annotated[float, Meta(ge=0, le=1e7)] | UnsetType = UNSET
    speculation: Speculation | UnsetType = UNSET


class Result(msgspec.Struct, frozen=True):
    """What a cell gave. `cpu_s` is the processor time that it took to simulate."""

    key: str
    cell: Cell
    figures: Figures
    cpu_s: float


def check(cells: Iterable[Cell]) -> None:
    """Find what is wrong with cells before the first runs: it is not to be found after an hour.

    Raises `ConfigError`, `TraceError`, `CostError`, or ValueError for a rule's parameter.
    """
    traces: dict[Cell, Sequence[TraceRequest]] = {}
    for cell in cells:
        checked_table(Cell, msgspec.to_builtins(cell), flag_of)
        _check_loop(cell)
        if cell.streams is UNSET:
            whole = msgspec.structs.replace(cell, policy="", speed=1.0, window_s=None)
            if whole not in traces:
                traces[whole] = _trace_of(cell)
            _load_of(cell, traces[whole])
        costs = _costs_of(cell)
        if not is_rule(cell.policy):
            costs.check(catalog_of(cell))
        elif speculates(cell.policy):
            if cell.speculation is UNSET:
                raise ConfigError(f"--policy {cell.policy}: makes proposals; say with --acceptance which are right")
            costs.speculation(1, 2, 1)
        cell_key(cell)


def _check_loop(cell: Cell) -> None:
    """Raises `ConfigError` if what is asked of a closed loop, or of its absence, does not go together."""
    if (cell.trace == CLOSED_LOOP) is (cell.streams is UNSET):
        raise ConfigError(f"--trace {CLOSED_LOOP} and --streams: one needs the other")
    if cell.streams is UNSET:
        return
    if cell.window_s is None:
        raise ConfigError(f"--trace {CLOSED_LOOP}: streams never end; give the seconds of a --window")
    if cell.streams > cell.slots:
        raise ConfigError(f"--streams {cell.streams}: more than there are --slots, {cell.slots}")
    if cell.warmup_s is not UNSET and cell.warmup_s >= cell.window_s:
        raise ConfigError(f"--warmup {cell.warmup_s:g}: must be below the --window, {cell.window_s:g}")


def _costs_of(cell: Cell) -> CostTable:
    speculation = cell.speculation
    if speculation is UNSET or speculation.draft_costs is UNSET:
        return load_costs(Path(cell.costs))
    return load_costs(Path(cell.costs), Path(speculation.draft_costs))


def cell_key(cell: Cell) -> str:
    """A digest of the cell, its files and its policy. Raises OSError or `ConfigError` where they cannot be read."""
    whole: list[object] = [msgspec.to_builtins(cell), _digest(cell.costs)]
    if cell.trace not in _NO_FILE:
        whole.append(_digest(cell.trace))
    if cell.speculation is not UNSET and cell.speculation.draft_costs is not UNSET:
        whole.append(_digest(cell.speculation.draft_costs))
    if is_rule(cell.policy):
        whole.append(canonical(cell.policy))
    else:
        whole.extend((msgspec.to_builtins(load_policy(cell.policy)), msgspec.to_builtins(load_recipe(cell.recipe))))
    return hashlib.sha256(msgspec.json.encode(whole)).hexdigest()[:16]


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def requests_of(cell: Cell) -> list[TraceRequest]:
    """The load of a cell. Raises `TraceError`, also if no request falls into the window."""
    return _load_of(cell, _trace_of(cell))


def _trace_of(cell: Cell) -> Sequence[TraceRequest]:
    if cell.trace == TWO_CLIENTS:
        everything = two_clients(_TWO_CLIENTS_S, _TWO_CLIENTS_RATES, _TWO_CLIENTS_TOKENS, _TWO_CLIENTS_TOKENS)
    else:
        everything = read_trace(Path(cell.trace), cell.seed)
    return everything if cell.half is UNSET else half_of(everything, cell.half)


def _load_of(cell: Cell, everything: Sequence[TraceRequest]) -> list[TraceRequest]:
    requests = load(everything, cell.speed, cell.window_s)
    if not requests:
        if cell.window_s is None:
            raise TraceError(f"trace {cell.trace}: no request in its {cell.half} half")
        raise TraceError(f"trace {cell.trace}: no request within {cell.window_s:g} s; give a longer --window")
    return requests


def catalog_of(cell: Cell) -> tuple[GraphShape, ...]:
    """The prepared graphs of the simulated device, mixed ones where the recipe has any for so few slots. Raises
    `ConfigError`."""
    recipe = load_recipe(cell.recipe)
    largest = max(recipe.prefill_tokens, default=0)
    rows = padded_concurrency(cell.slots)
    mixed = (
        min(recipe.mixed_batches, default=rows + 1) <= rows and min(recipe.mixed_prefill_tokens, default=0) <= largest
    )
    speculation = None if cell.speculation is UNSET else cell.speculation.graphs
    return build_catalog(recipe, cell.slots, largest, mixed_prefill=mixed, speculation=speculation)


def run_cell(cell: Cell, progress: OnProgress = lambda _share: None) -> Result:
    """Simulate a cell. Raises `TraceError`, `CostError`, `ConfigError`, or ValueError for a rule's parameter."""
    started = time.process_time()
    key, (arrivals, window_s) = cell_key(cell), _arrivals_of(cell)
    until_ns = None if cell.drain and cell.streams is UNSET else round(window_s * NS_PER_S)
    outcomes = _serve(cell, arrivals, until_ns, progress)
    figures = measure(outcomes, cell.slo, window_s, 0.0 if cell.warmup_s is UNSET else cell.warmup_s)
    return Result(key, cell, figures, time.process_time() - started)


def _arrivals_of(cell: Cell) -> tuple[Arrivals, float]:
    """What arrives, and the seconds within which it does."""
    if cell.streams is not UNSET and cell.window_s is not None:
        return ClosedLoop(cell.streams, cell.window_s, cell.seed), cell.window_s
    requests = requests_of(cell)
    return OpenLoop(requests), cell.window_s or max(requests[-1].arrival_s, 1e-9)


def _serve(cell: Cell, arrivals: Arrivals, until_ns: int | None, progress: OnProgress) -> list[Outcome]:
    costs, factors = _costs_of(cell), jitter(cell.seed, cell.noise)
    proposer = NO_PROPOSER if cell.speculation is UNSET else proposer_of(cell.speculation, cell.seed)
    if is_rule(cell.policy):
        return simulate(
            make_rule(cell.policy),
            arrivals,
            costs,
            slots=cell.slots,
            kv_tokens=cell.kv_tokens,
            jitter=factors,
            acceptance=proposer.acceptance,
            until_ns=until_ns,
            progress=progress,
        )
    catalog = catalog_of(cell)
    costs.check(catalog)
    policy: Policy = load_policy(cell.policy)
    server = VirtualServer(
        arrivals,
        policy,
        catalog,
        costs,
        slots=cell.slots,
        kv_tokens=cell.kv_tokens,
        jitter=factors,
        proposer=proposer,
        keeps_prefixes=cell.speculation is not UNSET and cell.speculation.fixed_width is not None,
    )
    return server.run(until_ns, progress)


def jitter(seed: int, noise: float) -> Callable[[int], float]:
    """Factors on durations by the number of the frame: uniform, with mean 1 and standard deviation `noise`."""
    spread = noise * 3**0.5
    if not 0 <= spread < 1:
        raise ValueError(f"--noise {noise}: must be at least 0 and below {3**-0.5:.3f}")
    return lambda number: 1.0 + spread * (2.0 * (mix(mix(seed + 1) ^ number) / 2**64) - 1.0)
