"""Many cells on all cores, and the file that remembers which are done.

Owns processes and the results file. Does not own what a cell does (`cells`). Surprising rule: a result is written the
moment it is there, so that an interrupted sweep goes on where it stood; a line that was cut short is dropped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import msgspec

from .cells import Cell, Result, cell_key, run_cell
from .outputs import writing

OnShare = Callable[[float], None]
"""Called with the number of cells that are done, fractions of the one that runs among them."""


def run_cells(cells: Sequence[Cell], jobs: int, results: Path | None, progress: OnShare) -> list[Result]:
    """Run the cells that `results` does not have, in at most `jobs` processes; all results in the cells' order.

    To be called in the main thread if `jobs` is more than one, since signals are off while processes begin. Raises what
    `run_cell` raises, `OutputError`, and ValueError for a file that holds something else; what was finished before is
    in the file then.
    """
    known = read_results(results)
    keys = [cell_key(cell) for cell in cells]
    missing = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in known}
    before = len(cells) - len(missing)
    progress(before)
    for result in _run(list(missing.values()), jobs, lambda done: progress(before + done)):
        known[result.key] = result
        if results is not None:
            with writing("--results", results):
                append_result(results, result)
    return [known[key] for key in keys]


def _run(cells: Sequence[Cell], jobs: int, progress: OnShare) -> Iterator[Result]:
    if jobs == 1 or len(cells) <= 1:
        for place, cell in enumerate(cells):
            yield run_cell(cell, partial(_within, progress, place))
        return
    # A fresh interpreter for each worker: a fork would copy whatever threads the libraries have begun.
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    workers = min(jobs, len(cells))
    with theirs, ours, ProcessPoolExecutor(workers, context, _begin_worker, (theirs,)) as executor:
        try:
            futures = _submit(executor, cells)
            for count, future in enumerate(as_completed(futures), 1):
                yield future.result()
                progress(count)
        except BaseException:
            ours.close()  # else the executor waits for what they are doing
            raise


def _submit(executor: ProcessPoolExecutor, cells: Sequence[Cell]) -> list[Future[Result]]:
    """Processes begin here. They inherit that SIGINT is ignored: Ctrl-C goes to all of a terminal's processes, and this
    one ends the others."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return [executor.submit(run_cell, cell) for cell in cells]
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin_worker(alive: Connection) -> None:
    Thread(target=_end_with, args=(alive,), daemon=True).start()


def _end_with(alive: Connection) -> None:
    """End this process, whatever it does, when the other end is closed, as it is when that process has ended."""
    alive.poll(None)
    os._exit(1)


def _within(progress: OnShare, place: int, share: float) -> None:
    progress(place + share)


def read_results(path: Path | None) -> dict[str, Result]:
    """The finished cells of a JSON-lines file by key; none if there is no file. Raises ValueError for a line that is no
    result."""
    found: dict[str, Result] = {}
    if path is None or not path.is_file():
        return found
    for number, line in enumerate(_whole_lines(path).splitlines(), 1):
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a result: {error}; name another file") from None
        found[result.key] = result
    return found


def append_result(path: Path, result: Result) -> None:
    """Add a line to the file, which is made where there is none."""
    if path.is_file():
        whole = _whole_lines(path)
        if len(whole) < path.stat().st_size:
            path.write_bytes(whole)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def _whole_lines(path: Path) -> bytes:
    held = path.read_bytes()
    return held[: held.rfind(b"\n") + 1]
