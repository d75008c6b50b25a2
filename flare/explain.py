"""`flare explain`: a logged decision, taken again (docs/observability.md, "Explain").

Owns the comparison of a decision with its log line, the table of candidates and the sentence on why one won. Does not
own the decision: the selector that serves is the selector that explains. Surprising rule: equal means equal to the last
bit, scores included, since a decision depends on nothing but its view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flare.machines.graph import GraphShape
from flare.machines.selection.select import select
from flare.machines.selection.view import Candidate, Decision, Plan, View

from .trace_events import PlanCommitted, lane_entries
from .trace_reader import TraceError, find_plan, read_plans

_DIFFERENCES_SHOWN = 10
_WIDTH_MIN = 120
"""Columns that the table needs; a narrower terminal breaks its lines itself, and nothing is left out."""


def explain(
    trace: Annotated[Path, typer.Argument(help="A trace written with --trace FILE --trace-views.")],
    plan: Annotated[int | None, typer.Option("--plan", help="The number of the plan to explain.")] = None,
    all_plans: Annotated[bool, typer.Option("--all", help="Take every logged decision again and compare.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many candidates.")] = 40,
) -> None:
    """Take logged decisions again: show the candidates of one, or compare them all."""
    console = Console()
    console.width = max(console.width, _WIDTH_MIN)
    if (plan is None) != all_plans:
        raise typer.BadParameter("give either --plan N or --all")
    try:
        same = check_all(console, trace) if plan is None else explain_plan(console, find_plan(trace, plan), limit)
    except (TraceError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    if not same:
        raise typer.Exit(1)


def logged_view(logged: PlanCommitted) -> View:
    """The view of a logged plan. Raises `TraceError` when it was logged without."""
    if isinstance(logged.view, msgspec.UnsetType):
        raise TraceError(f"plan {logged.n} was logged without its view; trace with --trace-views")
    return logged.view


def differences(logged: PlanCommitted, plan: Plan | None) -> list[str]:
    """What a plan taken again has otherwise than its log line, as `field: logged, now`; empty if nothing."""
    if plan is None:
        return ["plan: was committed, now nothing is submitted"]
    pairs: dict[str, tuple[object, object]] = {
        "shape": (logged.shape, plan.shape.name),
        "lanes": (logged.lanes, lane_entries(plan.lanes)),
        "duration_ns": (logged.duration_ns, plan.duration_ns),
        "observation_age_ns": (logged.observation_age_ns, plan.observation_age_ns),
        "score": (logged.score, plan.score),
        "log_scale": (logged.log_scale, plan.log_scale),
        "reason": (logged.reason, plan.reason),
    }
    return [f"{name}: was {was!r}, now {now!r}" for name, (was, now) in pairs.items() if was != now]


def check_all(console: Console, trace: Path) -> bool:
    """Take every decision of `trace` again; print how many are identical. True if all are (and there are any)."""
    total = different = 0
    for logged in read_plans(trace):
        total += 1
        found = differences(logged, select(logged_view(logged)).plan)
        if found:
            different += 1
            if different <= _DIFFERENCES_SHOWN:
                console.print(f"plan {logged.n}: {'; '.join(found)}", markup=False, highlight=False)
    if not total:
        raise TraceError(f"{trace} has no committed plan")
    console.print(f"{total} decisions taken again: {total - different} identical, {different} different")
    return not different


def explain_plan(console: Console, logged: PlanCommitted, limit: int) -> bool:
    """Print the candidates of a logged plan and why it won. True if the decision is the same as logged."""
    view = logged_view(logged)
    decision = select(view, explain=True)
    console.print(f"[bold]Plan {logged.n}[/bold], frame {logged.fence}: {_situation(view)}", highlight=False)
    competing = [candidate for candidate in decision.candidates if not _barred(candidate)]
    console.print(_table(competing[:limit]))
    if len(competing) > limit:
        console.print(
            f"{len(competing) - limit} more compete; show them with --limit {len(competing)}", highlight=False
        )
    for line in _left_out(decision.candidates):
        console.print(line, style="dim", markup=False, highlight=False)
    console.print(why(decision, view), markup=False, highlight=False)
    found = differences(logged, decision.plan)
    if found:
        console.print("Differs from the log. " + "; ".join(found), style="red", markup=False, highlight=False)
    else:
        console.print("The same as logged.", style="green")
    return not found


def why(decision: Decision, view: View) -> str:
    """One or two sentences on why the winner won, or why nothing is submitted."""
    plan = decision.plan or decision.awaited
    if plan is None:
        return f"Nothing is submitted: {decision.hold}."
    text = f"{_describe(plan.shape, [lane.slot for lane in plan.lanes])} wins"
    others = [rival for rival in decision.candidates if rival.lost is not None and not _barred(rival)]
    if plan.duration_ns == 0:
        text += ": its duration is not known yet, and an unknown graph goes before the known ones"
    elif not others:
        text += ": there is no other candidate"
    elif plan.score > others[0].score:
        text += f" with {_number(plan.score)} value/ms, {_number(plan.score - others[0].score)} more than "
        text += f"{_describe(others[0].shape, others[0].slots)}, the next best"
    else:
        text += f": {_describe(others[0].shape, others[0].slots)} is worth the same, and the tie order decides"
        text += f" ({others[0].lost})"
    text += "."
    if plan.log_scale:
        text += f" Values are scaled by exp(-{plan.log_scale:.4g})."
    if decision.awaited is not None:
        frames = ", ".join(str(frame.fence) for frame in view.window)
        text += f" It needs an empty window, so nothing is submitted until frame {frames} ends."
    return text


def _situation(view: View) -> str:
    parts = [f"{len(view.requests)} resident requests", f"{view.queued_requests} waiting for a slot"]
    if view.window:
        parts.append("in flight: " + ", ".join(f"{frame.shape.name} (frame {frame.fence})" for frame in view.window))
    return ", ".join(parts)


def _barred(candidate: Candidate) -> bool:
    """Whether a rule kept it out of the contest, whatever its score: its reason is `rule: what makes it needless`."""
    return candidate.lost is not None and ": " in candidate.lost


def _left_out(candidates: Sequence[Candidate]) -> Iterator[str]:
    """A line for each reason to leave graphs out."""
    shapes: dict[str, dict[str, None]] = {}
    for candidate in candidates:
        if candidate.lost is not None and _barred(candidate):
            shapes.setdefault(candidate.lost, {})[candidate.shape.name] = None
    for reason, names in shapes.items():
        yield f"Left out: {', '.join(names)} ({reason})."


def _table(candidates: Sequence[Candidate]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), caption="times in ms, values in prompt tokens, scores in value/ms"
    )
    table.add_column("", no_wrap=True)
    table.add_column("graph", no_wrap=True)
    table.add_column("slots", min_width=8)
    gaps = any(candidate.gap_cost for candidate in candidates)
    for heading in ("tokens", "time", "service", "age", "waiting", *(("gaps",) if gaps else ()), "score"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    table.add_column("why it lost", min_width=24)
    for candidate in candidates:
        table.add_row(*_cells(candidate, gaps=gaps), style="bold green" if candidate.lost is None else None)
    return table


def _cells(candidate: Candidate, *, gaps: bool) -> Iterator[str]:
    known = candidate.duration_ns > 0
    yield "*" if candidate.lost is None else ""
    yield candidate.shape.name
    yield " ".join(str(slot) for slot in candidate.slots)
    yield str(candidate.tokens)
    yield f"{candidate.duration_ns / 1e6:.2f}" if known else "?"
    yield _number(candidate.service)
    yield _number(candidate.age_term) if known else "-"
    yield _number(candidate.waiting_cost) if known else "-"
    if gaps:
        yield _number(candidate.gap_cost) if known else "-"
    yield _number(candidate.score)
    yield "drains" if candidate.needs_empty_window else "behind"
    yield candidate.lost or ""


def _describe(shape: GraphShape, slots: Sequence[int]) -> str:
    return f"{shape.name} for slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def _number(value: float) -> str:
    return f"{value:.5g}"
