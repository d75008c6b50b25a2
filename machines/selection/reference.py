"""The yardsticks of a request, from the measured catalog: reference interval (sigma) and token normalizer (r).

Owns docs/scheduling.md, "Ages and reference intervals", and the normalizers of "Prices". Does not own prices.
Surprising rule: a stale graph still counts, and an unknown one never does; with nothing measured there is no yardstick.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..graph import GraphKind
from ..ids import RequestHandle
from .lanes import Floats, Graphs, Ints, decoding, graphs_of, prompting
from .prompt import prompt_work
from .view import Phase, View


class Normalizer(NamedTuple):
    """The fastest expected token service of a request, tokens/ms, and its reference interval. None: not measured."""

    tokens_per_ms: float | None
    sigma_ms: float | None


UNMEASURED = Normalizer(None, None)


def reference_interval(duration_ms: Floats, batch: Ints, family: int, streams: int) -> float | None:
    """sigma = K * min T/min(B, k) over the measured graphs [g] of a family of k = `family` among K = `streams`.

    Entries of `duration_ms` that are 0 are unknown. None if nothing is measured or there is no stream.
    """
    known = duration_ms > 0.0
    if streams == 0 or family == 0 or not known.any():
        return None
    return streams * float((duration_ms[known] / np.minimum(batch[known], family)).min())


def decode_rate(graphs: Graphs) -> float:
    """The greatest 1/T over measured decode graphs, in tokens/ms; 0 if none is measured."""
    known = graphs.known
    return 1.0 / float(graphs.duration_ms[known].min()) if known.any() else 0.0


def prompt_rates(expected: Floats, graphs: Graphs) -> Floats:
    """The greatest (expected tokens)/T over measured graphs for each prompt row [m]; 0 if none is measured.

    `expected` is [m, g].
    """
    known = graphs.known
    if not known.any():
        return np.zeros(len(expected))
    return np.asarray((expected[:, known] / graphs.duration_ms[known]).max(axis=1))


def normalizers(view: View) -> dict[RequestHandle, Normalizer]:
    """The normalizers that a commit freezes, for every request of `view`.

    A prompt row has no reference interval, and one that can be served no more has neither.
    """
    decode = graphs_of(view, GraphKind.DECODE)
    streams = decoding(view)
    sigma_ms = reference_interval(decode.duration_ms, decode.batch, len(streams), len(streams))
    stream = Normalizer(decode_rate(decode) or None, sigma_ms)
    found = {row.slot: stream for row in streams}
    for phase, kind in ((Phase.PREFILL, GraphKind.PREFILL), (Phase.SCORED_PREFILL, GraphKind.SCORED_PREFILL)):
        graphs, rows = graphs_of(view, kind), prompting(view, phase)
        if rows and graphs.rows:
            rates = prompt_rates(prompt_work(rows, graphs).expected, graphs)
            found |= {row.slot: Normalizer(float(rate) or None, None) for row, rate in zip(rows, rates, strict=True)}
    return {RequestHandle(row.slot, row.generation): found.get(row.slot, UNMEASURED) for row in view.requests}
