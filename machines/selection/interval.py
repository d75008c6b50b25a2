"""How often a stream could be delivered to if all streams shared the device evenly.

Owns the time that one lane of a family takes at the best rate, and the family's reference interval (docs/scheduling.md,
"Ages and reference intervals"). Does not own which streams and graphs form a family. Surprising rule: a stale graph
still counts, and an unknown one never does; with nothing measured there is no interval.
"""

from __future__ import annotations

import numpy as np

from .lanes import Floats, Ints


def row_ms(duration_ms: Floats, batch: Ints, family: int) -> float | None:
    """min T/min(B, k) over the measured graphs [g] of a family of k = `family`: what one lane costs at the best rate.

    Entries of `duration_ms` that are 0 are unknown. None if nothing is measured or the family is empty.
    """
    if family == 0:
        return None
    shares = duration_ms / np.minimum(batch, family)
    least_ms = float(shares.min(initial=np.inf))
    if least_ms == 0.0:
        least_ms = float(shares.min(initial=np.inf, where=shares > 0.0))
    return None if least_ms == np.inf else least_ms


def reference_interval(duration_ms: Floats, batch: Ints, family: int, streams: int) -> float | None:
    """sigma = K * min T/min(B, k) over the measured graphs [g] of a family of k = `family` among K = `streams`.

    As `row_ms`; also None if there is no stream.
    """
    least_ms = row_ms(duration_ms, batch, family) if streams else None
    return None if least_ms is None else streams * least_ms
