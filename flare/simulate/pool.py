"""Many cells on all cores, and the file that remembers which are done.

Owns processes and the results file. Does not own what a cell does (`cells`). Surprising rule: a result is written the
moment it is there, so that an interrupted sweep goes on where it stood; a line that was cut short is dropped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import msgspec

from .cells import Cell, Result, cell_key, run_cell

OnShare = Callable[[float], None]
"""Called with the number of cells that are done, fractions of the one that runs among them."""


def run_cells(cells: Sequence[Cell], jobs: int, results: Path | None, progress: OnShare) -> list[Result]:
    """Run the cells that `results` does not have, in at most `jobs` processes; all results in the cells' order.

    Raises what `run_cell` raises, and ValueError for a file that holds something else; what was finished before is in
    the file then.
    """
    known = read_results(results)
    keys = [cell_key(cell) for cell in cells]
    missing = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in known}
    before = len(cells) - len(missing)
    progress(before)
    for result in _run(list(missing.values()), jobs, lambda done: progress(before + done)):
        known[result.key] = result
        if results is not None:
            append_result(results, result)
    return [known[key] for key in keys]


def _run(cells: Sequence[Cell], jobs: int, progress: OnShare) -> Iterator[Result]:
    if jobs == 1 or len(cells) <= 1:
        for place, cell in enumerate(cells):
            yield run_cell(cell, partial(_within, progress, place))
        return
    # A fresh interpreter for each worker: a fork would copy whatever threads the libraries have begun.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=context) as executor:
        futures = [executor.submit(run_cell, cell) for cell in cells]
        try:
            for count, future in enumerate(as_completed(futures), 1):
                yield future.result()
                progress(count)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _within(progress: OnShare, place: int, share: float) -> None:
    progress(place + share)


def read_results(path: Path | None) -> dict[str, Result]:
    """The finished cells of a JSON-lines file by key; none if there is no file. Raises ValueError for a line that is no
    result."""
    found: dict[str, Result] = {}
    if path is None or not path.exists():
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
    if path.exists():
        whole = _whole_lines(path)
        if len(whole) < path.stat().st_size:
            path.write_bytes(whole)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def _whole_lines(path: Path) -> bytes:
    held = path.read_bytes()
    return held[: held.rfind(b"\n") + 1]
