"""Which shapes are too large for the work at hand.

Owns one test for all kinds: a shape is surplus if a smaller one of its kind already does the same logical work
(docs/scheduling.md, "Score"). Does not own what counts as the same work. Surprising rule: no duration enters, so a
lucky measurement never makes redundant padding preferable.
"""

from __future__ import annotations

import numpy as np

from .compiled import Bools, Larger


def surplus(count: int, larger: Larger, covers: Bools) -> Bools:
    """[..., g] of `count` shapes: a smaller one does the same work.

    `covers` [..., e] says for each pair of `larger` whether the smaller shape does what the larger one would, and
    competes. If all smaller shapes compete, the pairs with nothing in between are enough: what a smaller shape covers,
    each one between the two covers as well.
    """
    found = np.zeros((*covers.shape[:-1], count), np.bool_)
    found[..., larger.heads] = np.logical_or.reduceat(covers, larger.starts, axis=-1)
    return found
