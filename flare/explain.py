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
from flare.machines.selection.view import Candidate, Decision, Following, Plan, Reason, View

from .failure import show_error
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
        show_error(error)
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
    for line in sequences(competing, view):
        console.print(line, markup=False, highlight=False)
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
    text = f"{_describe(plan.shape, [lane.slot for lane in plan.lanes], plan.following)} wins"
    others = _rivals(decision.candidates)
    if plan.reason is Reason.TIMING_REFRESH:
        text += ": its duration is stale, and the refresh ledger has paid for measuring it again"
    elif plan.reason is Reason.ACCEPTANCE_PROBE:
        text += f": it may come to {_number(plan.score)} value/ms, and the probe ledger has paid for learning how many "
        text += "of its proposals are accepted"
    elif plan.duration_ns == 0 or (plan.following is not None and plan.following.duration_ns == 0):
        text += ": its duration is not known yet, and an unknown graph goes before the known ones"
    elif not others:
        text += ": there is no other candidate"
    elif plan.score > others[0].score:
        text += f" with {_number(plan.score)} value/ms, {_number(plan.score - others[0].score)} more than "
        text += f"{_named(others[0])}, the next best"
    else:
        text += f": {_named(others[0])} is worth the same, and the tie order decides"
        text += f" ({others[0].lost})"
    text += "."
    if plan.log_scale:
        text += f" Values are scaled by exp(-{plan.log_scale:.4g})."
    if decision.awaited is not None:
        frames = ", ".join(str(frame.fence) for frame in view.window)
        text += f" It needs an empty window, so nothing is submitted until frame {frames} ends."
    return text


def sequences(competing: Sequence[Candidate], view: View) -> Iterator[str]:
    """Where the winner or the best alternative has two graphs: both of them spelled out, stage by stage, with the terms
    of their scores."""
    winner = next((candidate for candidate in competing if candidate.lost is None), None)
    shown = [*([] if winner is None else [("Chosen", winner)]), *[("Next best", one) for one in _rivals(competing)[:1]]]
    if any(candidate.following is not None for _, candidate in shown):
        ready = {row.slot for row in view.requests if not row.stages}
        for title, candidate in shown:
            yield f"{title}: {_stages(candidate, ready)}; {_terms(candidate)}."


def _stages(candidate: Candidate, ready: set[int]) -> str:
    """Each graph of a candidate: its time, and what it does for whom. `ready` are the slots that wait for no stage."""
    following = candidate.following
    if following is None:
        return f"{_timed(candidate.shape, candidate.duration_ns)} for {_slots(candidate.slots)}"
    served = [lane.slot for lane in following.lanes]
    newly = [slot for slot in served if slot not in ready]
    beside = [slot for slot in served if slot in ready]
    first = [slot for slot in candidate.slots if slot not in beside]
    # Of those that the first graph serves, the ended ones wait for no stage.
    retired = [slot for slot in first if slot in ready]
    spare = [slot for slot in first if slot not in newly and slot not in retired]
    parts = [f"enables {_slots(newly)}"]
    parts += [f"retires {_slots(retired)}"] if retired else []
    parts += [f"advances {_slots(spare)} in the room left"] if spare else []
    text = f"{_timed(candidate.shape, candidate.duration_ns)} {', '.join(parts)}; "
    text += f"then {_timed(following.shape, following.duration_ns)} serves {_slots(newly)}"
    return text + (f" and, ready before, {_slots(beside)}" if beside else "")


def _terms(candidate: Candidate) -> str:
    """The score as it is made up."""
    whole_ns = _whole_ns(candidate)
    if not whole_ns:
        return f"service {_number(candidate.service)}, not divided by a time that is not known"
    text = f"(service {_number(candidate.service)} + age {_number(candidate.age_term)}) / {whole_ns / 1e6:.2f} ms"
    text += f" - waiting {_number(candidate.waiting_cost)}"
    text += f" - gaps {_number(candidate.gap_cost)}" if candidate.gap_cost else ""
    return f"{text} = {_number(candidate.score)} value/ms"


def _whole_ns(candidate: Candidate) -> int:
    """The time of all graphs of a candidate; 0 if one of them is not known."""
    following = candidate.following
    if following is None or not candidate.duration_ns:
        return candidate.duration_ns
    return candidate.duration_ns + following.duration_ns if following.duration_ns else 0


def _timed(shape: GraphShape, duration_ns: int) -> str:
    return f"{shape.name} ({f'{duration_ns / 1e6:.2f} ms' if duration_ns else 'not measured'})"


def _situation(view: View) -> str:
    parts = [f"{len(view.requests)} resident requests", f"{view.queued_requests} waiting for a slot"]
    if view.window:
        parts.append("in flight: " + ", ".join(f"{frame.shape.name} (frame {frame.fence})" for frame in view.window))
    return ", ".join(parts)


def _rivals(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that competed and lost, best first."""
    return [candidate for candidate in candidates if candidate.lost is not None and not _barred(candidate)]


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
    rows = any(candidate.targets for candidate in candidates)
    middle = (*(("rows",) if rows else ()), "time", "service", "age", "waiting", *(("gaps",) if gaps else ()))
    for heading in ("tokens", *middle, "score"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("queue", no_wrap=True)
    table.add_column("why it lost", min_width=24)
    for candidate in candidates:
        table.add_row(*_cells(candidate, gaps=gaps, rows=rows), style="bold green" if candidate.lost is None else None)
    return table


def _cells(candidate: Candidate, *, gaps: bool, rows: bool) -> Iterator[str]:
    known, following = _whole_ns(candidate) > 0, candidate.following
    times_ns = [candidate.duration_ns, *([] if following is None else [following.duration_ns])]
    yield "*" if candidate.lost is None else ""
    yield candidate.shape.name if following is None else f"{candidate.shape.name}, {following.shape.name}"
    yield " ".join(str(slot) for slot in candidate.slots)
    yield str(candidate.tokens)
    if rows:
        # Those that a program shares out itself are only expected.
        yield ("~" if candidate.allocates else "") + " ".join(str(count) for count in candidate.targets)
    yield " + ".join(f"{time_ns / 1e6:.2f}" if time_ns else "?" for time_ns in times_ns)
    yield _number(candidate.service)
    yield _number(candidate.age_term) if known else "-"
    yield _number(candidate.waiting_cost) if known else "-"
    if gaps:
        yield _number(candidate.gap_cost) if known else "-"
    yield _number(candidate.score)
    yield "drains" if candidate.needs_empty_window else "behind"
    yield candidate.lost or ""


def _named(candidate: Candidate) -> str:
    return _describe(candidate.shape, candidate.slots, candidate.following)


def _describe(shape: GraphShape, slots: Sequence[int], following: Following | None) -> str:
    then = "" if following is None else f", then {following.shape.name}"
    return f"{shape.name} for {_slots(slots)}{then}"


def _slots(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def _number(value: float) -> str:
    return f"{value:.5g}"
