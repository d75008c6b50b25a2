"""Sizes of memory as people write them.

Owns `2GiB` into bytes and back. Surprising rule: GB and GiB differ, as they do everywhere but in advertising.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SHOWN = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("", 1))
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512 MiB`, `1.5g` or `1048576`.

    Raises `ValueError` with the accepted forms if `text` is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a unit, such as 2GiB, 512MiB or 1073741824")
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def size_text(size: int) -> str:
    """`size` bytes in the largest unit that divides them, such as `2GiB`."""
    unit, bytes_of_unit = next((unit, step) for unit, step in _SHOWN if size % step == 0)
    return f"{size // bytes_of_unit}{unit}"
