"""Run worlds again: `python -m tests.simulation SEED [--seeds N] [--events N] [--cuda] [--verbose]`.

Owns the command line, and how a failing seed says what it is. Surprising rule: a seed means the same world only with
the same number of events.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

from .cuda_world import CudaWorld, cuda_scenario
from .scenario import scenario
from .world import World

EVENTS = 70


def run_worlds(
    first: int,
    end: int,
    events: int = EVENTS,
    tell: Callable[[str], None] = lambda _line: None,
    *,
    cuda: bool = False,
) -> Counter[str]:
    """Run the worlds of the seeds [first, end), with `cuda` those of the CUDA device, and count what happened. The
    first that fails raises, with a note that says how to run it again."""
    total: Counter[str] = Counter()
    for seed in range(first, end):
        world = CudaWorld(cuda_scenario(seed), tell) if cuda else World(scenario(seed), tell)
        try:
            world.run(events)
        except BaseException as error:
            error.add_note(
                f"run it again: python -m tests.simulation {seed} --events {events} --verbose" + " --cuda" * cuda
            )
            raise
        total += world.counts
    return total


def main() -> None:
    """Run one seed, or several from it on; the first that fails ends the command with its error."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run, from SEED on")
    parser.add_argument("--events", type=int, default=EVENTS, help="events under load, before the faults stop")
    parser.add_argument("--cuda", action="store_true", help="worlds of the CUDA device on the fake runtime")
    parser.add_argument("--verbose", action="store_true", help="print every event and effect")
    args = parser.parse_args()
    tell = print if args.verbose else lambda _line: None
    total = run_worlds(args.seed, args.seed + args.seeds, args.events, tell, cuda=args.cuda)
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))


if __name__ == "__main__":
    main()
