"""Which shapes are too large for the work at hand.

Owns one test that serves two rules: a shape is surplus if a smaller one of its kind already does the same logical work
(docs/scheduling.md, "Discovery, staleness, exploration"). Does not own which shapes are compared. Surprising rule: no
duration enters, so a lucky measurement never makes redundant padding preferable.
"""

from __future__ import annotations

import numpy as np

from .lanes import Bools, Ints

_NOTHING_COVERS = np.iinfo(np.int64).max


def smallest_cover(extent: Ints, needed: Ints, among: Bools) -> Ints:
    """The smallest of `extent` [g] that is at least `needed` [...], of those that `among` [..., g] admits.

    A value beyond every extent if there is none.
    """
    covers = among & (extent >= needed[..., None])
    return np.asarray(np.where(covers, extent, _NOTHING_COVERS).min(axis=-1, initial=_NOTHING_COVERS))


def surplus(extent: Ints, needed: Ints, among: Bools) -> Bools:
    """[..., g]: a strictly smaller extent, admitted by `among`, already covers what is `needed` [...]."""
    return np.asarray(extent > smallest_cover(extent, needed, among)[..., None])
