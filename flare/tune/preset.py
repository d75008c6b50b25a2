"""The preset that a search writes: every coefficient, and in comments what it rests on.

Owns the text of the file. Does not own reading it (`flare.config.loader`). Surprising rule: all coefficients are
written, those of the default preset too, so that the file keeps its meaning if a default changes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

from flare.config.schema import Policy

_WIDTH = 118


def toml(policy: Policy, comments: Sequence[str] = ()) -> str:
    """A policy file, with one paragraph of comment for each of `comments`."""
    lines = [f"# {line}" for comment in comments for line in textwrap.wrap(comment, _WIDTH, subsequent_indent="  ")]
    values = [f"{key} = {_text(value)}" for key, value in msgspec.structs.asdict(policy).items()]
    return "\n".join([*lines, *([""] if lines else []), *values, ""])


def _text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).removesuffix(".0")
