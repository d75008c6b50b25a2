"""Where Flare keeps what it can make or fetch again.

Owns the choice of the cache directory. Does not own what lies in it. Surprising rule: nothing is created here; whoever
writes makes its own folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$FLARE_CACHE_DIR`, else `flare` in `$XDG_CACHE_HOME` (when absolute, as its specification asks), else
    `~/.cache/flare`."""
    if chosen := os.environ.get("FLARE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "flare"
