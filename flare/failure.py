"""How a command says what went wrong: one line on standard error.

Owns its form. Does not own exit codes. Surprising rule: the line is never broken, so that
logs and `grep` have it whole.
"""

from __future__ import annotations

from rich.console import Console


def show_error(error: Exception) -> None:
    """Print what `error` says, and of what the system refused the file and the reason."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    console = Console(stderr=True, markup=False, emoji=False)
    console.print(f"error: {text}", style="red", highlight=False, soft_wrap=True)
