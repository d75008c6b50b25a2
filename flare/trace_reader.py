"""Reading a trace back.

Owns how committed plans are found in a file of JSON lines. Does not own the events or what is made of them. Surprising
rule: a last line without its end is what a crash leaves, and is passed over; any other line that cannot be read is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from .trace_events import PlanCommitted

_PLAN_PREFIX = b'{"event":"plan.committed",'


class TraceError(ValueError):
    """The file is not a trace that can be used; the message says why, and what to do."""


def read_plans(path: Path) -> Iterator[PlanCommitted]:
    """The committed plans of a trace, in order. Raises `TraceError`, and OSError where the file cannot be read."""
    decoder = msgspec.json.Decoder(PlanCommitted)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.startswith(_PLAN_PREFIX) or not line.endswith(b"\n"):
                continue
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: not a committed plan of this version: {error}") from error


def find_plan(path: Path, n: int) -> PlanCommitted:
    """Plan number `n`. Raises `TraceError` when the trace lacks it, and says what it has."""
    first = last = None
    for plan in read_plans(path):
        if plan.n == n:
            return plan
        first = plan.n if first is None else first
        last = plan.n
    has = "no committed plan" if first is None else f"plans {first} to {last}"
    raise TraceError(f"{path} has {has}, not plan {n}; choose another --plan")
