"""Traces of requests: what arrived when, how long its prompt was and how much it was answered.

Owns the two file formats (CSV, JSON lines) and the choice of a load: speed and window. Does not own any text: a prompt
is its length. Surprising rule: a file whose times are relative to sessions gives each session a start of its own, drawn
as a Poisson process, because all of them at once would be a load that nobody has.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Half = Literal["first", "second"]
"""A part of a trace: what arrives before the middle of its time, or from there on."""

SESSION_SPACING_S = 10.0
"""Mean time between the starts of two sessions, where a trace has sessions."""

ARRIVAL_MAX_S = 4e9
"""Times are 64-bit nanoseconds; half of what they hold is left to serve what arrives last."""

_TOKENS_MAX = 1e9
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


class TraceError(ValueError):
    """A trace that cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `output_tokens` is both what it may produce and what it does produce, at least 1. Its content is its
    `seed`: what the simulated target draws for it, and which proposals are right."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    client: str = ""
    seed: int = 0


def read_trace(path: Path, seed: int = 0) -> tuple[TraceRequest, ...]:
    """The requests of a file in order of arrival (docs/simulation.md, "Traces").

    `.jsonl` holds an object a line, anything else is CSV with a heading; `arrival_s`, `prompt_tokens` and
    `output_tokens` are required, `client` is read where it is there, and `session` (then also the client) starts the
    clock of its requests anew. `seed` draws the starts of sessions. Raises `TraceError`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"trace {path}: cannot be read: {error.strerror}; name a CSV or JSON lines file") from None
    except UnicodeDecodeError:
        raise TraceError(f"trace {path}: is not UTF-8 text") from None
    rows = _objects(path, text) if path.suffix == ".jsonl" else _records(path, text)
    requests, sessions = [], False
    for number, row in rows:
        sessions = sessions or "session" in row
        requests.append(_request(f"trace {path}, line {number}", row))
    if not requests:
        raise TraceError(f"trace {path}: holds no request")
    if sessions:
        requests = _spread(requests, seed)
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def load(requests: Iterable[TraceRequest], speed: float = 1.0, window_s: float | None = None) -> list[TraceRequest]:
    """The requests that arrive within the first `window_s` seconds when times are divided by `speed`."""
    if speed <= 0:
        raise TraceError(f"--speed {speed}: must be above 0")
    faster = [
        replace(request, arrival_s=request.arrival_s / speed, seed=place) for place, request in enumerate(requests)
    ]
    chosen = [request for request in faster if window_s is None or request.arrival_s < window_s]
    if chosen and chosen[-1].arrival_s > ARRIVAL_MAX_S:
        raise TraceError(f"--speed {speed}: puts an arrival beyond {ARRIVAL_MAX_S:g} s; take more, or give a --window")
    return chosen


def half_of(requests: Sequence[TraceRequest], half: Half) -> list[TraceRequest]:
    """One half by time of `requests` (in order of arrival); the middle of the span is where the second begins.

    One half can then settle what the other is to judge (docs/simulation.md, "Tuning").
    """
    middle_s = (requests[0].arrival_s + requests[-1].arrival_s) / 2
    if half == "first":
        return [request for request in requests if request.arrival_s < middle_s]
    later = (request for request in requests if request.arrival_s >= middle_s)
    return [replace(request, arrival_s=request.arrival_s - middle_s) for request in later]


def two_clients(seconds: float, rates: Sequence[float], prompt: int, output: int) -> tuple[TraceRequest, ...]:
    """The overload of Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588): clients that ask at
    even intervals, each at its rate (requests/s), for the same work."""
    requests = [
        TraceRequest(index / rate, prompt, output, f"client-{number}")
        for number, rate in enumerate(rates)
        for index in range(int(seconds * rate))
    ]
    return tuple(sorted(requests, key=lambda request: (request.arrival_s, request.client)))


def _objects(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    # Not `splitlines`: JSON strings may hold what that takes for a line's end.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"trace {path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"trace {path}, line {number}: must be a JSON object")
        yield number, row


def _records(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    rows = (row for row in reader if any(map(str.strip, row)))
    try:
        heading = [name.strip() for name in next(rows, ())]
        for key in _COLUMNS:
            if key not in heading:
                raise TraceError(
                    f"trace {path}, line {max(1, reader.line_num)}: has no column {key}; name it in the heading"
                )
        for row in rows:
            yield reader.line_num, dict(zip(heading, row, strict=False))
    except csv.Error as error:
        raise TraceError(f"trace {path}, line {reader.line_num}: not valid CSV: {error}") from None


def _request(where: str, row: Mapping[str, object]) -> TraceRequest:
    arrival_s = _number(where, row, "arrival_s", 0, ARRIVAL_MAX_S)
    prompt = _number(where, row, "prompt_tokens", 1, _TOKENS_MAX, whole=True)
    output = _number(where, row, "output_tokens", 0, _TOKENS_MAX, whole=True)
    client = next((row[key] for key in ("client", "session") if row.get(key) is not None), "")
    # Some logs have answers without a token; here every request has its first.
    return TraceRequest(arrival_s, int(prompt), max(1, int(output)), str(client))


def _number(
    where: str, row: Mapping[str, object], key: str, least: float, most: float, *, whole: bool = False
) -> float:
    value = row.get(key)
    if value is None:
        raise TraceError(f"{where}: {key} is missing")
    try:
        number = float(str(value))
    except ValueError:
        raise TraceError(f"{where}: {key} is {value!r:.40}; it must be a number") from None
    if not least <= number <= most or (whole and number != int(number)):
        kind = "whole number" if whole else "number"
        raise TraceError(f"{where}: {key} is {number:g}; it must be a {kind} from {least:g} to {most:g}")
    return number


def _spread(requests: Iterable[TraceRequest], seed: int) -> list[TraceRequest]:
    rng, starts = random.Random(seed), dict[str, float]()
    start_s, spread = 0.0, []
    for request in requests:
        if request.client not in starts:
            starts[request.client] = start_s
            start_s += rng.expovariate(1 / SESSION_SPACING_S)
        spread.append(replace(request, arrival_s=request.arrival_s + starts[request.client]))
    return spread
