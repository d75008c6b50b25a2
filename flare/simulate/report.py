"""Results as tables: for a terminal, and as Markdown for documents.

Owns columns and number formats. Surprising rule: where several loads are shown, results keep the order in which they
were asked for; nothing is ranked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UnsetType
from rich import box
from rich.table import Table

from .cells import WINDOW_LEAST_S, Result

HEADINGS = (
    *("policy", "speed", "requests", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "max", "good"),
    *("service gap", "undone", "× time"),
)

LOOP_HEADINGS = (
    *("policy", "streams", "requests", "tok/s", "per stream", "latency p50", "p99", "TTFT p50", "p99", "× time"),
)
"""Of closed loops."""

CAPTION = "times in ms; service gap in tokens, output ones twice; × time: seconds simulated by one of processor time"

LOOP_CAPTION = "times in ms, latency of whole requests; × time: seconds simulated by one of processor time"


def cells_of(result: Result) -> tuple[str, ...]:
    """One row, under `HEADINGS`."""
    figures = result.figures
    return (
        result.cell.policy,
        f"{result.cell.speed:g}",
        f"{figures.requests:,}",
        f"{figures.output_tokens_per_s:,.0f}" if figures.window_s >= WINDOW_LEAST_S else "-",
        *map(number, (figures.ttft_p50, figures.ttft_p99, figures.itl_p50, figures.itl_p99, figures.gap_max)),
        f"{figures.good:.1%}",
        "-" if figures.service_gap is None else f"{figures.service_gap:,.0f}",
        f"{figures.unfinished:,}",
        f"{figures.simulated_s / result.cpu_s:.1f}",
    )


def loop_cells_of(result: Result) -> tuple[str, ...]:
    """One row, under `LOOP_HEADINGS`."""
    figures, streams = result.figures, result.cell.streams
    assert not isinstance(streams, UnsetType)
    return (
        result.cell.policy,
        f"{streams}",
        f"{figures.requests:,}",
        f"{figures.output_tokens_per_s:,.0f}",
        f"{figures.output_tokens_per_s / streams:.1f}",
        *map(number, (figures.latency_p50, figures.latency_p99, figures.ttft_p50, figures.ttft_p99)),
        f"{figures.simulated_s / result.cpu_s:.1f}",
    )


def number(value: float | None) -> str:
    """Milliseconds, to a tenth below 100."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def table(results: Iterable[Result]) -> Table:
    """All results, for a terminal."""
    found = list(results)
    loop = any(not isinstance(result.cell.streams, UnsetType) for result in found)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), caption=LOOP_CAPTION if loop else CAPTION)
    for place, heading in enumerate(LOOP_HEADINGS if loop else HEADINGS):
        shown.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for result in found:
        shown.add_row(*(loop_cells_of(result) if loop else cells_of(result)))
    return shown


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, one line a row."""
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
