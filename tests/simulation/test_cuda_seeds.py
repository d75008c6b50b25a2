"""Many worlds of the CUDA device: its own code on the fake runtime, in virtual time.

Owns how many are run: a quarter of FLARE_SIMULATION_SEEDS, 250 unless that is set. Surprising rule: as in
`test_seeds`, a run in which some fault or some kind of graph never came about fails too.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from flare.graphs.sim.timing import Fault
from flare.machines.graph import GraphKind

from .__main__ import EVENTS, run_worlds
from .cuda_world import CudaWorld, cuda_scenario

SEEDS = int(os.environ.get("FLARE_SIMULATION_SEEDS", "1000")) // 4
SEEN = {
    *("completed", "delivered", "failed", "frames_1", "frames_2", "lost", "malformed", "copies", "allocated"),
    *("stopped", "cancelled_in_flight", "refused_commits"),
    *(fault.value for fault in (Fault.FAILED, Fault.UNTIMED, Fault.LATE)),
    *(kind.value for kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL, GraphKind.DECODE)),
    *(kind.value for kind in (GraphKind.SPECULATIVE, GraphKind.MIXED)),
}


def run(first: int, end: int) -> Counter[str]:
    """Those of the seeds [first, end)."""
    return run_worlds(first, end, cuda=True)


def test_worlds() -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = os.cpu_count() or 1
    bounds = [SEEDS * part // workers for part in range(workers + 1)]
    with ProcessPoolExecutor(max_workers=workers, mp_context=spawn) as pool:
        seen = sum(pool.map(run, bounds, bounds[1:]), Counter[str]())
    assert SEEDS < 100 or not SEEN - seen.keys()


def test_a_seed_is_one_world() -> None:
    told: list[list[str]] = [[], []]
    for lines in told:
        CudaWorld(cuda_scenario(11), lines.append).run(EVENTS)
    assert told[0] == told[1]
    assert len(told[0]) > 100
