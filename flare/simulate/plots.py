"""Plots of results: latency against load, closed loops against their streams, and each load's course in time.

Owns what is drawn. Does not own files beyond naming them. Surprising rule: figures are made without pyplot, whose state
is global, and files carry no date and fixed ids, so that the same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import UnsetType

from .cells import Result
from .figures import Figures

_SIZE = (9.0, 3.2)


def draw(results: Sequence[Result], folder: Path, suffix: str) -> list[Path]:
    """Draw `streams` for closed loops; else `latency` if there are several speeds, and a `timeline` for each speed. The
    files that were written, as `suffix` (svg or png)."""
    folder.mkdir(parents=True, exist_ok=True)
    loop = any(not isinstance(result.cell.streams, UnsetType) for result in results)
    speeds = list(dict.fromkeys(result.cell.speed for result in results))
    written = []
    with rc_context(
        {"svg.hashsalt": "flare", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}
    ):
        if loop:
            return [_save(streams(results), folder / f"streams.{suffix}")]
        if len(speeds) > 1:
            written.append(_save(latency(results), folder / f"latency.{suffix}"))
        for speed in speeds:
            name = "timeline" if len(speeds) == 1 else f"timeline_{repr(speed).removesuffix('.0')}"
            chosen = [result for result in results if result.cell.speed == speed]
            written.append(_save(timeline(chosen), folder / f"{name}.{suffix}"))
    return written


def latency(results: Sequence[Result]) -> Figure:
    """The share of good requests and the 99th percentiles against the load, a line for each policy."""
    figure = Figure(_SIZE, layout="constrained")
    panels: list[tuple[Axes, str, Callable[[Figures], float | None]]] = list(
        zip(
            figure.subplots(1, 3),
            ("good requests, %", "TTFT p99, ms", "ITL p99, ms"),
            (lambda it: 100 * it.good, lambda it: it.ttft_p99, lambda it: it.itl_p99),
            strict=True,
        )
    )
    for axes, title, value in panels:
        for policy in dict.fromkeys(result.cell.policy for result in results):
            points = sorted((r.cell.speed, value(r.figures)) for r in results if r.cell.policy == policy)
            known = [(speed, y) for speed, y in points if y is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], marker=".", label=policy)
        axes.set_title(title)
        axes.set_xlabel("load, × the trace's own speed")
        if not title.startswith("good"):
            axes.set_yscale("log")
    panels[0][0].legend(fontsize=6)
    return figure


def streams(results: Sequence[Result]) -> Figure:
    """Output rate and median latency of requests against the number of streams, each as a share of what the policy that
    is best there attains."""
    figure = Figure(_SIZE, layout="constrained")
    panels: list[tuple[Axes, str, Callable[[Figures], float | None], bool]] = list(
        zip(
            figure.subplots(1, 2),
            ("output tokens/s, share of the best", "median latency of a request, of the least"),
            (lambda it: it.output_tokens_per_s, lambda it: it.latency_p50),
            (True, False),
            strict=True,
        )
    )
    levels = list(dict.fromkeys(result.cell.streams for result in results))
    for axes, title, value, greatest in panels:
        found = {(result.cell.policy, result.cell.streams): value(result.figures) for result in results}
        known = {place: y for place, y in found.items() if y is not None}
        best = {
            at: (max if greatest else min)([y for (_, other), y in known.items() if other == at]) for _, at in known
        }
        for policy in dict.fromkeys(result.cell.policy for result in results):
            shown = [level for level in levels if (policy, level) in known]
            ratios = [known[policy, level] / best[level] for level in shown]
            axes.plot([str(level) for level in shown], ratios, marker=".", label=policy)
        axes.set_title(title)
        axes.set_xlabel("streams")
    panels[0][0].legend(fontsize=6)
    return figure


def timeline(results: Sequence[Result]) -> Figure:
    """Output rate, waiting requests and (with several clients) the service gap in time, a line for each policy."""
    fair = any(result.figures.timeline.service_gap for result in results)
    figure = Figure(_SIZE, layout="constrained")
    axes = list(figure.subplots(1, 3 if fair else 2))
    titles = ("output tokens/s", "requests without a first token", "largest service gap so far")
    for result in results:
        line = result.figures.timeline
        ends = [line.bin_s * (bin_ + 1) for bin_ in range(len(line.waiting))]
        for place, values in zip(axes, (line.output_tokens_per_s, line.waiting, line.service_gap), strict=False):
            place.plot(ends[: len(values)], values, label=result.cell.policy, linewidth=1)
    for place, title in zip(axes, titles, strict=False):
        place.set_title(title)
        place.set_xlabel("seconds")
    axes[0].legend(fontsize=6)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
