"""Figures of a simulated run: rates, latencies, the share that was served well.

Owns what is reported and what counts as good (docs/simulation.md, "Figures"). Does not own fairness between clients
(`fairness`). Surprising rule: the rate is that of the window in which requests arrive, so that the time in which the
rest is worked off does not dilute it; what is not finished when the run ends is not good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from flare.bench.stats import percentile

from .fairness import service_gaps
from .outcome import NS_PER_S, Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_BINS = 120


class Slo(msgspec.Struct, frozen=True):
    """What a good request had: its first token within `ttft_ms`, and the 99th percentile of its own gaps within
    `itl_ms`."""

    ttft_ms: float = 1000.0
    itl_ms: float = 50.0


def parse_slo(text: str) -> Slo:
    """`ttft=1000,itl=50`, in milliseconds. Raises ValueError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if key not in ("ttft", "itl") or not equals or not 0 < number < float("inf"):
            raise ValueError(f"{part!r}: give milliseconds, as ttft=1000,itl=50")
        if f"{key}_ms" in values:
            raise ValueError(f"{key} is given twice; leave out one")
        values[f"{key}_ms"] = number
    return msgspec.convert(values, Slo)


class Timeline(msgspec.Struct, frozen=True):
    """The run in bins of `bin_s` seconds: output tokens/s, and at each bin's end the requests that wait for their first
    token and those that have it and are not finished; the largest gap in service between clients so far."""

    bin_s: float
    output_tokens_per_s: tuple[float, ...]
    waiting: tuple[int, ...]
    streaming: tuple[int, ...]
    service_gap: tuple[float, ...]


class Figures(msgspec.Struct, frozen=True):
    """One run. Times are milliseconds unless they say seconds; None where there is nothing to measure."""

    requests: int
    refused: int
    unfinished: int
    window_s: float
    simulated_s: float
    output_tokens_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    gap_max: float | None
    good: float
    service_gap: float | None
    timeline: Timeline
    latency_p50: float | None = None
    latency_p99: float | None = None


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was finished and served within the objective."""
    if not outcome.finished or (outcome.tokens[0] - outcome.arrival_ns) / 1e6 > slo.ttft_ms:
        return False
    gaps = sorted(later - earlier for earlier, later in pairwise(outcome.tokens))
    return not gaps or percentile(gaps, 0.99) / 1e6 <= slo.itl_ms


def measure(outcomes: Sequence[Outcome], slo: Slo, window_s: float, warmup_s: float = 0.0) -> Figures:
    """The figures of a run whose requests arrived within `window_s` seconds, at least one of them. Of tokens before
    `warmup_s`, and of requests that arrived before, only the timeline tells."""
    times = np.concatenate([np.frombuffer(outcome.tokens, np.int64) for outcome in outcomes])
    end_ns = max(int(times.max()) if len(times) else 0, round(window_s * NS_PER_S))
    begin_ns, window_ns = round(warmup_s * NS_PER_S), round(window_s * NS_PER_S)
    counted = [outcome for outcome in outcomes if outcome.arrival_ns >= begin_ns]
    lines = [np.frombuffer(outcome.tokens, np.int64) for outcome in counted if outcome.tokens]
    gaps = np.concatenate([np.zeros(0), *map(np.diff, lines)]) / 1e6
    first = np.array([outcome.tokens[0] - outcome.arrival_ns for outcome in counted if outcome.tokens]) / 1e6
    whole = np.array([outcome.tokens[-1] - outcome.arrival_ns for outcome in counted if outcome.finished]) / 1e6
    gap_instants, gap_values = service_gaps(counted)
    ttft, itl, latency = _percentiles(first), _percentiles(gaps), _percentiles(whole)
    return Figures(
        requests=len(counted),
        refused=sum(outcome.refused for outcome in counted),
        unfinished=sum(not outcome.finished for outcome in counted),
        window_s=window_s,
        simulated_s=end_ns / NS_PER_S,
        output_tokens_per_s=float(((times > begin_ns) & (times <= window_ns)).sum() / (window_s - warmup_s)),
        ttft_p50=ttft[0],
        ttft_p99=ttft[1],
        itl_p50=itl[0],
        itl_p99=itl[1],
        gap_max=float(gaps.max()) if len(gaps) else None,
        good=sum(is_good(outcome, slo) for outcome in counted) / max(1, len(counted)),
        service_gap=max(gap_values) if gap_values else None,
        timeline=_timeline(outcomes, times, end_ns, gap_instants, gap_values),
        latency_p50=latency[0],
        latency_p99=latency[1],
    )


def _percentiles(values: Floats) -> tuple[float | None, float | None]:
    if not len(values):
        return None, None
    p50, p99 = np.percentile(values, (50, 99))
    return float(p50), float(p99)


def _timeline(
    outcomes: Iterable[Outcome],
    times: Ints,
    end_ns: int,
    gap_instants: Sequence[int],
    gap_values: Sequence[float],
) -> Timeline:
    edges = np.linspace(0, end_ns, _BINS + 1)
    bin_s = end_ns / _BINS / NS_PER_S
    accepted = [outcome for outcome in outcomes if not outcome.refused]
    arrived = _by(edges, [outcome.arrival_ns for outcome in accepted])
    begun = _by(edges, [outcome.tokens[0] for outcome in accepted if outcome.tokens])
    ended = _by(edges, [outcome.tokens[-1] for outcome in accepted if outcome.finished])
    worst = np.maximum.accumulate(np.array([0.0, *gap_values]))
    return Timeline(
        bin_s=bin_s,
        output_tokens_per_s=tuple(np.round(np.histogram(times, edges)[0] / bin_s, 1).tolist()),
        waiting=tuple((arrived - begun).tolist()),
        streaming=tuple((begun - ended).tolist()),
        service_gap=tuple(worst[_by(edges, gap_instants)].tolist()) if gap_values else (),
    )


def _by(edges: Floats, instants: Sequence[int]) -> Ints:
    """How many of `instants` have come by the end of each bin."""
    return np.searchsorted(np.sort(np.array(instants, np.int64)), edges[1:], side="right").astype(np.int64)
