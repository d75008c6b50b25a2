"""Run worlds again: `python -m tests.simulation SEED [--seeds N] [--events N] [--verbose]`.

Owns the command line alone. Surprising rule: a seed means the same world only with the same number of events.
"""

from __future__ import annotations

import argparse
from collections import Counter

from .scenario import scenario
from .world import World

EVENTS = 200


def main() -> None:
    """Run one seed, or several from it on; the first that fails ends the command with its error."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run, from SEED on")
    parser.add_argument("--events", type=int, default=EVENTS, help="events under load, before the faults stop")
    parser.add_argument("--verbose", action="store_true", help="print every event and effect")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.seeds):
        world = World(scenario(seed), print if args.verbose else lambda _line: None)
        try:
            world.run(args.events)
        except BaseException:
            print(f"seed {seed} fails: python -m tests.simulation {seed} --events {args.events} --verbose")
            raise
        total += world.counts
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))


if __name__ == "__main__":
    main()
