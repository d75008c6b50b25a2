"""Progress of a start, for people.

Owns the bars that fetching and preparing show. Does not own the work. Surprising rule: without a terminal there are no
bars, only a log line for each prepared graph.
"""

from __future__ import annotations

import sys
from types import TracebackType

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flare.machines.graph import GraphShape


class LoadProgress:
    """A context in which `fetching` and `prepared` show how far a start has come. Safe to call from any thread."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
        )
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self._terminal)
        self._tasks: dict[str, TaskID] = {}
        self._log = structlog.get_logger()

    def __enter__(self) -> LoadProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def fetching(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what` are there (0: not known how many)."""
        if not self._terminal and what not in self._tasks:
            self._log.info("model.fetching", what=what, megabytes=round(total / 1e6))
        self._show(what, done, total, f"{done / 1e6:.0f} / {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB")

    def prepared(self, shape: GraphShape, done: int, total: int) -> None:
        """`done` of `total` graphs are ready, `shape` the last of them."""
        if not self._terminal:
            self._log.info("graph.prepared", graph=shape.name, done=done, total=total)
        self._show("preparing graphs", done, total, f"{done}/{total} {shape.name}")

    def _show(self, what: str, done: int, total: int, text: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None, done=text)
        self._bars.update(self._tasks[what], completed=done, total=total or None, done=text)
