"""What a check of a GPU found, as a table for people and as JSON.

Owns the record of one finding, and turning a section that breaks into a finding of its own. Does not own what is
measured. Surprising rule: nothing is left out quietly; what could not be done is a row that failed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table


class Finding(msgspec.Struct, frozen=True):
    """One row: `value` with its unit; `limit` is what it had to keep to, empty where it is told and not judged."""

    section: str
    what: str
    value: str
    limit: str = ""
    ok: bool = True


def judged(
    section: str, what: str, value: float, unit: str, *, most: float | None = None, least: float | None = None
) -> Finding:
    """A number that must keep to a limit."""
    ok = (most is None or value <= most) and (least is None or value >= least)
    limit = f"at most {most:g}" if most is not None else f"at least {least:g}"
    return Finding(section, what, f"{value:.3g} {unit}".strip(), f"{limit} {unit}".strip(), ok)


def guarded(section: str, run: Callable[[], Iterable[Finding]], console: Console) -> list[Finding]:
    """The findings of a section, and how long it took; what it raises is a finding that failed."""
    began, found = time.monotonic(), list[Finding]()
    console.print(f"{section} ...", highlight=False)
    try:
        found.extend(run())
    except Exception as error:  # noqa: BLE001 - the other sections still have something to tell
        traceback.print_exc()
        said = " ".join(str(error).split())[:300]
        found.append(Finding(section, "does not run", f"{type(error).__name__}: {said}", "runs", ok=False))
    return [*found, Finding(section, "took", f"{time.monotonic() - began:.0f} s")]


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print all of it."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("section", "what", "value", "limit", ""):
        table.add_column(heading, overflow="fold")
    last = ""
    for each in findings:
        name, last = "" if each.section == last else each.section, each.section
        mark = "FAILED" if not each.ok else "ok" if each.limit else ""
        table.add_row(name, each.what, each.value, each.limit, mark, style=None if each.ok else "bold red")
    console.print(table)
