"""Durations from a table of measured costs: what a graph of any extents takes, in milliseconds.

Owns the file format, its checks and the interpolation (docs/simulation.md, "Costs"). Does not own noise, drift or
faults (`timing`). Surprising rule: a prepared graph does the work of its capacity, whatever it serves; only the context
that its lanes really have is read, so that a padded row costs its place in the batch and no attention.
"""

from __future__ import annotations

import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flare.machines.graph import STAGE_KINDS, GraphKind, GraphShape, Source

from ..frames import Frame, LaneInput
from .timing import Duration

NS_PER_MS = 1e6

_MS_MIN, _MS_MAX = 1e-6, 1e6
_COUNT_MAX = 1e9
_ROUNDING = 1e-9
_RISES = "; more work never takes less time: use the running maximum"
_EXTENT = re.compile(r"0*[1-9][0-9]{0,8}")


class CostError(ValueError):
    """A table of costs that cannot be used; the message names the key and the fix."""


class Curve:
    """Piecewise linear through points (x, y). Below the first it is flat, beyond the last the last slope goes on."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Mapping[float, float]) -> None:
        self._xs = sorted(points)
        self._ys = [points[x] for x in self._xs]

    @property
    def points(self) -> dict[float, float]:
        """What it goes through."""
        return dict(zip(self._xs, self._ys, strict=True))

    def at(self, x: float) -> float:
        """The value at `x`."""
        xs, ys = self._xs, self._ys
        high = min(bisect_right(xs, x), len(xs) - 1)
        if high == 0:
            return ys[0]
        low = high - 1
        return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low])


class Surface:
    """A curve for each row of a grid, linear between rows; below the first row and beyond the last as `Curve`."""

    __slots__ = ("_curves", "_xs")

    def __init__(self, rows: Mapping[float, Curve]) -> None:
        self._xs = sorted(rows)
        self._curves = [rows[x] for x in self._xs]

    def at(self, x: float, y: float) -> float:
        """The value at row `x` and place `y`."""
        xs, curves = self._xs, self._curves
        high = min(bisect_right(xs, x), len(xs) - 1)
        if high == 0:
            return curves[0].at(y)
        low = high - 1
        share, before = (x - xs[low]) / (xs[high] - xs[low]), curves[low].at(y)
        return before if share == 0.0 else before + (curves[high].at(y) - before) * share


Chunks = Iterable[tuple[int, int]]
"""Prompt chunks of a graph: (tokens, what was cached of their prompt before them)."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """What one device takes with one model. Times are milliseconds; contexts, prompts and chunks are tokens.

    A `context` is the mean over all rows of the batch, empty ones included. Chunks of several prompts cost what one
    chunk of all their tokens does, and each what reading its own past adds.
    """

    name: str
    kv_bytes_per_token: int
    reference_context: float
    decode_grid: Surface
    prefill_curve: Curve
    past_grid: Surface
    mixed_grid: Surface
    verify_grid: Surface | None = None
    scored: Curve | None = None
    draft: Curve | None = None
    stages: Mapping[GraphKind, Curve] = field(default_factory=dict)

    def decode(self, batch: float, context: float) -> float:
        """One token for each of `batch` rows."""
        return self.decode_grid.at(context, batch)

    def prefill(self, tokens: float, past: float = 0.0) -> float:
        """`tokens` prompt tokens behind `past` cached ones."""
        return self.prefill_curve.at(tokens) + self.past_grid.at(past, tokens)

    def past(self, chunks: Chunks) -> float:
        """What reading the cache adds to prompt chunks."""
        return sum([self.past_grid.at(past, tokens) for tokens, past in chunks if past])

    def mixed(self, batch: float, context: float, tokens: float, chunks: Chunks = ()) -> float:
        """`batch` decoding rows beside `tokens` prompt tokens, which are those of `chunks`; either may be none."""
        fresh = self.prefill_curve.at(tokens)
        if batch <= 0:
            return fresh + self.past(chunks)
        decode = self.decode(batch, context)
        if tokens <= 0:
            return decode
        # The grid has fresh prompts beside rows at the reference context; attention to more, or to less, is added.
        together = self.mixed_grid.at(batch, tokens) + decode - self.decode(batch, self.reference_context)
        return max(together, decode, fresh) + self.past(chunks)

    def speculation(self, batch: float, width: float, proposals: int) -> float:
        """What it adds to decoding `batch` rows that each row has `width` target positions (their mean), and that the
        program makes so many proposals for each. Raises `CostError` without data."""
        added = 0.0
        if width > 1:
            if self.verify_grid is None:
                fix = "verify is missing; give verify[width][batch] for speculative graphs"
                raise CostError(f"costs {self.name}: {fix}")
            added = self.verify_grid.at(width, batch) - self.verify_grid.at(1.0, batch)
        return added if self.draft is None else added + proposals * self.draft.at(batch)

    def graph(self, shape: GraphShape, context_tokens: float = 0.0, chunks: Chunks = ()) -> float:
        """A prepared graph at its capacity.

        `context_tokens` is the sum of its decoding rows' contexts, `chunks` are the prompt chunks that it really has.
        Raises `CostError` for a kind that the table says nothing about.
        """
        kind, batch, tokens = shape.kind, shape.batch, shape.prefill_tokens
        if kind in STAGE_KINDS:
            if kind not in self.stages:
                raise CostError(f"costs {self.name}: {kind} is missing; give {kind}[batch] for graph {shape.name}")
            return self.stages[kind].at(batch)
        if kind is GraphKind.SCORED_PREFILL and self.scored is not None:
            return self.scored.at(tokens) + self.past(chunks)
        if kind in (GraphKind.PREFILL, GraphKind.SCORED_PREFILL):
            return self.mixed(0, 0.0, tokens, chunks)
        # One row of a mixed graph may hold a prompt; where several do, the tokens that fit are the same.
        rows = batch - 1 if kind is GraphKind.MIXED else batch
        context = context_tokens / rows
        total = self.mixed(rows, context, tokens, chunks)
        if shape.width == 1:
            return total
        proposals = shape.draft_depth if shape.source is Source.DRAFT else 0
        return total + self.speculation(rows, shape.packed_targets / batch, proposals)

    def check(self, catalog: Iterable[GraphShape]) -> None:
        """Raises `CostError` if a graph of the catalog cannot be priced."""
        for shape in catalog:
            self.graph(shape)

    def duration(self, context_of: Callable[[LaneInput], int]) -> Duration:
        """Durations for the simulated device, where `context_of` knows the context of a decoding lane."""

        def of(frame: Frame) -> int:
            context, chunks = 0, []
            for lane in frame.lanes:
                if lane.tokens is not None:
                    chunks.append((len(lane.tokens), lane.start))
                elif lane.stage is None:
                    context += context_of(lane)
            return max(1, round(self.graph(frame.shape, context, chunks) * NS_PER_MS))

        return of


def load_costs(path: Path, draft: Path | None = None) -> CostTable:
    """Read a table, and from that of a draft model what a proposal costs: one of its decode steps. Raises `CostError`
    naming the file, the key and the fix."""
    costs = _read(path).table()
    return costs if draft is None else replace(costs, draft=_read(draft).curve("decode"))


def _read(path: Path) -> _Reader:
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CostError(f"costs {path}: cannot be read: {error.strerror}; name a JSON table of costs") from None
    except (ValueError, RecursionError) as error:
        raise CostError(f"costs {path}: not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise CostError(f"costs {path}: must be an object with the keys decode, prefill and mixed")
    return _Reader(str(path), table)


@dataclass(frozen=True, slots=True)
class _Reader:
    """The checks of one file."""

    source: str
    values: Mapping[str, object]

    def table(self) -> CostTable:
        reference = self._number("context_tokens", 1024)
        decode, prefill = self.curve("decode"), self.curve("prefill")
        contexts = self._curves("decode_by_context", {reference: decode}) | {reference: decode}
        pasts = {
            past: Curve({0.0: 0.0} | {at: max(0.0, ms - prefill.at(at)) for at, ms in curve.points.items()})
            for past, curve in self._curves("prefill_with_past", {0.0: prefill}).items()
        }
        mixed = {batch: Curve({0.0: decode.at(batch)} | curve.points) for batch, curve in self._curves("mixed").items()}
        verify = self._curves("verify", {1.0: decode})
        return CostTable(
            name=f"{self.values.get('gpu', '?')} {self.values.get('model', '?')}",
            kv_bytes_per_token=round(self._number("kv_bytes_per_token", 0)),
            reference_context=reference,
            decode_grid=Surface(contexts),
            # A prompt of one token is one row's work.
            prefill_curve=Curve({1.0: min(decode.at(1), *prefill.points.values())} | prefill.points),
            past_grid=Surface({0.0: Curve({0.0: 0.0})} | pasts),
            mixed_grid=Surface(mixed),
            verify_grid=Surface({1.0: decode} | verify) if verify else None,
            scored=self.curve("scored_prefill") if "scored_prefill" in self.values else None,
            draft=self.curve("draft") if "draft" in self.values else None,
            stages={kind: self.curve(kind.value) for kind in STAGE_KINDS if kind.value in self.values},
        )

    def _refuse(self, key: str, fix: str) -> CostError:
        return CostError(f"costs {self.source}: {key}: {fix}")

    def _number(self, key: str, default: float) -> float:
        return self._checked(key, self.values.get(key, default), 0, _COUNT_MAX, "number")

    def _checked(self, key: str, value: object, least: float, most: float, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._refuse(key, f"{value!r:.40} must be a {what} from {least:g} to {most:g}")
        return float(value)

    def curve(self, key: str) -> Curve:
        """The table under a key."""
        if key not in self.values:
            raise self._refuse(key, f'is missing; give a table of milliseconds, as "{key}": {{"64": 7.4}}')
        return Curve(self._points(key, self.values[key]))

    def _curves(self, key: str, beside: Mapping[float, Curve] | None = None) -> dict[float, Curve]:
        """A grid, none if `beside` is given: rows that it must go with, each above those of less work."""
        if key not in self.values:
            if beside is None:
                raise self._refuse(key, f'is missing; give tables of milliseconds, as "{key}": {{"1": {{"64": 7.4}}}}')
            return {}
        rows = self.values[key]
        if not isinstance(rows, dict) or not rows:
            raise self._refuse(key, "must be an object of tables, one for each row of the grid")
        grid = {self._place(key, place): Curve(self._points(f"{key}[{place}]", row)) for place, row in rows.items()}
        for (lower, less), (place, more) in itertools.pairwise(sorted((grid | dict(beside or {})).items())):
            for at in sorted({*less.points, *more.points}):
                if more.at(at) < less.at(at) * (1 - _ROUNDING):
                    problem = f"{more.at(at):g} ms is less than the {less.at(at):g} ms of row {lower:g}"
                    raise self._refuse(f"{key}[{place:g}][{at:g}]", problem + _RISES)
        return grid

    def _points(self, key: str, values: object) -> dict[float, float]:
        if not isinstance(values, dict) or not values:
            raise self._refuse(key, "must be an object of milliseconds, with the extent as its key")
        points: dict[float, float] = {}
        for place, value in values.items():
            extent = self._place(key, place)
            points[extent] = self._checked(f"{key}[{place}]", value, _MS_MIN, _MS_MAX, "number of milliseconds")
        for (before, less), (extent, ms) in itertools.pairwise(sorted(points.items())):
            if ms < less:
                raise self._refuse(f"{key}[{extent:g}]", f"{ms} ms is less than the {less} ms at {before:g}{_RISES}")
        return points

    def _place(self, key: str, place: str) -> float:
        if not _EXTENT.fullmatch(place):
            raise self._refuse(f"{key}[{place:.40}]", "its key must be a whole number from 1 to 999999999")
        return float(place)
