"""Where results go: tried before the work, so that a bad path does not cost an hour of it.

Owns the tries, and what is said of a place that cannot be written. Does not own formats. Surprising rule: to try a
folder makes it; a file that a try has made is removed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile


class OutputError(ValueError):
    """A place that cannot be written; the message names the option, the place and the reason."""


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns what the system refuses while `path`, the value of `option`, is written into `OutputError`."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{option}: cannot write {path}: {error.strerror}; name another place") from None


def try_file(option: str, path: Path | None) -> None:
    """Raises `OutputError` if `path` cannot be opened to write; leaves its contents alone."""
    if path is None:
        return
    with writing(option, path):
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()


def try_folder(option: str, path: Path | None) -> None:
    """Make the folder if it is not there. Raises `OutputError` if no file can be made in it."""
    if path is None:
        return
    with writing(option, path):
        path.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
