"""Numbers from records.

Owns the summaries of a run: rates, times to first token, gaps. Does not own how the load was made. Surprising rule: a
gap is the time between two chunks with text of one response; the time between two responses of a stream is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from .stream import Record


class Spread(msgspec.Struct, frozen=True):
    """The distribution of some times in ms; None where there are no values."""

    p50: float | None
    p99: float | None
    max: float | None


class Summary(msgspec.Struct, frozen=True):
    """One run. Rates are over its whole time, from the first request sent to the last answer's end. `chunks` are those
    with text; fewer than tokens means that some brought several, and gaps are between chunks."""

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int | None
    output_tokens: int
    chunks: int
    counted_by_usage: bool
    output_tokens_per_s: float
    first_token_ms: Spread
    gap_ms: Spread


class MixedSummary(msgspec.Struct, frozen=True):
    """Running streams, alone and while long prompts arrive; `stream_*` and `gap_ms` are of the latter."""

    alone_tokens_per_s: float
    stream_tokens_per_s: float
    gap_ms: Spread
    long_first_token_ms: Spread
    long_requests: int
    failed: int
    errors: dict[str, int]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values`, sorted and not empty, lie, interpolated linearly."""
    place = (len(values) - 1) * share
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(times_ns: Iterable[int]) -> Spread:
    """The distribution of `times_ns`."""
    times = sorted(time / 1e6 for time in times_ns)
    if not times:
        return Spread(None, None, None)
    return Spread(percentile(times, 0.5), percentile(times, 0.99), times[-1])


def gaps_ns(records: Iterable[Record], after_ns: int = 0, until_ns: int | None = None) -> list[int]:
    """The gaps that end in (`after_ns`, `until_ns`]."""
    return [
        later - earlier
        for record in records
        for earlier, later in pairwise(record.delivered_ns)
        if later > after_ns and (until_ns is None or later <= until_ns)
    ]


def tokens_between(records: Iterable[Record], after_ns: int, until_ns: int) -> float:
    """Output tokens delivered in (`after_ns`, `until_ns`]; a response's tokens are spread evenly over its chunks."""
    total = 0.0
    for record in records:
        inside = sum(1 for at_ns in record.delivered_ns if after_ns < at_ns <= until_ns)
        if inside:
            total += inside * record.output_tokens / len(record.delivered_ns)
    return total


def errors_of(records: Iterable[Record]) -> dict[str, int]:
    """How often each error came, most frequent first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())


def summarize(records: Sequence[Record]) -> Summary:
    """The summary of a run of at least one request. Failed requests count as such and enter nothing else."""
    good = [record for record in records if record.error is None]
    seconds = (max(record.ended_ns for record in records) - min(record.sent_ns for record in records)) / 1e9
    prompt_tokens = [record.prompt_tokens for record in good if record.prompt_tokens is not None]
    output_tokens = sum(record.output_tokens for record in good)
    first = [record.first_token_ns for record in good]
    return Summary(
        requests=len(records),
        failed=len(records) - len(good),
        errors=errors_of(records),
        seconds=seconds,
        prompt_tokens=sum(prompt_tokens) if len(prompt_tokens) == len(good) else None,
        output_tokens=output_tokens,
        chunks=sum(len(record.delivered_ns) for record in good),
        counted_by_usage=all(record.counted for record in good),
        output_tokens_per_s=output_tokens / seconds if seconds > 0 else 0.0,
        first_token_ms=spread(time for time in first if time is not None),
        gap_ms=spread(gaps_ns(good)),
    )


def summarize_mixed(
    streams: Sequence[Record], longs: Sequence[Record], alone: tuple[int, int], crowded: tuple[int, int]
) -> MixedSummary:
    """The summary of a mixed run; `alone` and `crowded` are its two parts, each from and to (ns)."""
    good = [record for record in streams if record.error is None]
    return MixedSummary(
        alone_tokens_per_s=tokens_between(good, *alone) / ((alone[1] - alone[0]) / 1e9),
        stream_tokens_per_s=tokens_between(good, *crowded) / ((crowded[1] - crowded[0]) / 1e9),
        gap_ms=spread(gaps_ns(good, *crowded)),
        long_first_token_ms=spread(
            time for record in longs if record.error is None and (time := record.first_token_ns) is not None
        ),
        long_requests=len(longs),
        failed=sum(1 for record in (*streams, *longs) if record.error is not None),
        errors=errors_of((*streams, *longs)),
    )
