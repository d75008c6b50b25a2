"""`flare explain`: decisions taken again, equal to the last bit, and told in words."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from flare.cli import main
from flare.explain import check_all, differences, explain_plan, why
from flare.machines.events import SubmitFrame
from flare.machines.graph import GraphKind
from flare.machines.ids import Fence
from flare.machines.selection.select import select
from flare.machines.selection.view import Reason, View
from flare.trace_events import PlanCommitted, plan_committed
from flare.trace_reader import TraceError, find_plan, read_plans
from tests.machines.build import (
    decode_shape,
    decoder,
    graph,
    prefill_shape,
    prompt,
    queued,
    stage_shape,
    terminal,
    view,
)
from tests.machines.oracle.rounds import packed_round

from .traces import committed, write_trace


def shown(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def sentence(seen: View) -> str:
    return why(select(seen, explain=True), seen)


def plan_for(seen: View) -> PlanCommitted:
    plan = select(seen).plan
    assert plan is not None
    return plan_committed(1, SubmitFrame(Fence(1), plan, (), ()), seen, with_view=True)


def test_every_logged_decision_comes_out_the_same(tmp_path: Path, console: Console) -> None:
    path = tmp_path / "trace.jsonl"
    plans = committed(300)
    write_trace(path, plans)
    assert list(read_plans(path)) == plans
    assert check_all(console, path)
    assert "300 decisions taken again: 300 identical, 0 different" in shown(console)


def test_a_changed_decision_is_found_and_named(tmp_path: Path, console: Console) -> None:
    path = tmp_path / "trace.jsonl"
    plans = committed(5)
    plans[2] = msgspec.structs.replace(plans[2], score=plans[2].score * (1 + 1e-15))
    write_trace(path, plans)
    assert not check_all(console, path)
    assert "plan 3: score: was" in shown(console)
    assert "5 decisions taken again: 4 identical, 1 different" in shown(console)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("shape", "decode/b64"), ("lanes", ()), ("duration_ns", 1), ("observation_age_ns", -1)),
        *(("score", 0.5), ("log_scale", 0.5), ("reason", Reason.DISCOVERY)),
    ],
)
def test_each_field_is_compared(field: str, value: object) -> None:
    seen = view([graph(decode_shape(1), 5.0)], [decoder(0)])
    logged = plan_for(seen)
    plan = select(seen).plan
    assert differences(logged, plan) == []
    (found,) = differences(msgspec.structs.replace(logged, **{field: value}), plan)
    assert found.startswith(f"{field}: was {value!r}, now ")
    assert differences(logged, None)


def test_the_table_has_all_candidates_and_why_they_lost(console: Console) -> None:
    seen = view(
        [graph(decode_shape(1), 5.0), graph(decode_shape(2), 6.0), graph(prefill_shape(64), 30.0)],
        [decoder(0), decoder(1), prompt(2, 60)],
    )
    decision = select(seen, explain=True)
    assert explain_plan(console, plan_for(seen), limit=40)
    text = shown(console)
    assert len(decision.candidates) >= 3
    for candidate in decision.candidates:
        assert candidate.shape.name in text
        assert candidate.lost is None or candidate.lost in text
    assert sum(1 for candidate in decision.candidates if candidate.lost is None) == 1
    assert "The same as logged." in text
    assert "3 resident requests" in text


def test_what_a_rule_leaves_out_does_not_compete(console: Console) -> None:
    graphs = [
        graph(decode_shape(1), 5.0),
        graph(decode_shape(2), 1.0),
        graph(decode_shape(4)),
        graph(prefill_shape(64), 5.0),
    ]
    seen = view([*graphs, graph(prefill_shape(128))], [decoder(0), prompt(1, 30)])
    assert explain_plan(console, plan_for(seen), limit=40)
    text = shown(console)
    assert "Left out: decode/b4, decode/b2 (redundant: batch 1 serves the same requests)." in text
    assert "Left out: prefill/t128 (unmeasured: capacity 64 reaches the same endpoint)." in text
    assert "prefill/t64 for slot 1 wins with" in text
    assert "more than decode/b1 for slot 0, the next best" in text


def test_a_limit_hides_candidates_and_says_so(console: Console) -> None:
    seen = view([graph(decode_shape(1), 5.0), graph(prefill_shape(64), 90.0)], [decoder(0), prompt(1, 60)])
    assert explain_plan(console, plan_for(seen), limit=1)
    assert "1 more compete" in shown(console)


def test_the_sentence_tells_a_win_by_value() -> None:
    text = sentence(view([graph(decode_shape(1), 5.0), graph(prefill_shape(64), 90.0)], [decoder(0), prompt(1, 60)]))
    assert text.startswith("prefill/t64 for slot 1 wins with ")
    assert "more than decode/b1 for slot 0, the next best." in text


def test_the_sentence_tells_a_win_by_not_being_known() -> None:
    text = sentence(view([graph(decode_shape(1)), graph(prefill_shape(64), 30.0)], [decoder(0), prompt(1, 60)]))
    assert "not known yet, and an unknown graph goes before the known ones" in text


def test_the_sentence_tells_a_lone_candidate() -> None:
    assert "there is no other candidate" in sentence(view([graph(decode_shape(1), 5.0)], [decoder(0)]))


def test_the_sentence_tells_a_wait_and_an_empty_server() -> None:
    waiting = view(
        [graph(decode_shape(1), 500.0), graph(prefill_shape(64), 5.0)],
        [decoder(0), prompt(1, 64, token_price=80.0)],
        window=(queued(decode_shape(1), 0, fence=12),),
    )
    text = sentence(waiting)
    assert "prefill/t64 for slot 1 wins" in text
    assert "nothing is submitted until frame 12 ends" in text
    assert sentence(view([graph(decode_shape(1), 5.0)], [])) == "Nothing is submitted: nothing_ready."


def two_stages(*, prefill_ms: float = 12.0) -> View:
    graphs = [
        graph(decode_shape(2), 8.0),
        graph(prefill_shape(64), prefill_ms),
        graph(stage_shape(GraphKind.SNAPSHOT, 1), 1.25),
        graph(stage_shape(GraphKind.SNAPSHOT, 4), 1.5),
    ]
    rows = [
        decoder(0, token_price=90.0),
        decoder(2, stages=(GraphKind.SNAPSHOT,), age_ms=300.0, token_price=90.0),
        terminal(3),
        prompt(5, 64, stages=(GraphKind.SNAPSHOT,), token_price=0.0),
    ]
    return view(graphs, rows)


def test_a_decision_of_two_stages_is_told_stage_by_stage_with_its_terms_and_the_best_alternative(
    console: Console,
) -> None:
    seen = two_stages()
    candidates = select(seen, explain=True).candidates
    winner, second = candidates[0], candidates[1]
    assert explain_plan(console, plan_for(seen), limit=40)
    text = " ".join(shown(console).split())
    assert "snapshot/b4, decode/b2 0 2 3 5 2 1.50 + 8.00" in text
    stages = "snapshot/b4 (1.50 ms) enables slot 2, retires slot 3, advances slot 5 in the room left; "
    stages += "then decode/b2 (8.00 ms) serves slot 2 and, ready before, slot 0; "
    terms = f"(service {winner.service:.5g} + age {winner.age_term:.5g}) / 9.50 ms - waiting {winner.waiting_cost:.5g}"
    assert f"Chosen: {stages}{terms} = {winner.score:.5g} value/ms." in text
    assert "snapshot/b4 for slots 2, 3, 5, then decode/b2 wins with" in text  # the plan serves its own alone
    terms = f"(service {second.service:.5g} + age {second.age_term:.5g}) / 9.25 ms - waiting {second.waiting_cost:.5g}"
    stages = "snapshot/b1 (1.25 ms) enables slot 2; then decode/b2 (8.00 ms) serves slot 2 and, ready before, slot 0; "
    assert f"Next best: {stages}{terms} = {second.score:.5g} value/ms." in text
    assert "more than snapshot/b1 for slots 0, 2, then decode/b2, the next best." in text


def test_a_decision_of_one_stage_is_told_by_the_table_alone(console: Console) -> None:
    seen = view([graph(decode_shape(1), 5.0), graph(prefill_shape(64), 90.0)], [decoder(0), prompt(1, 60)])
    assert explain_plan(console, plan_for(seen), limit=40)
    assert "Chosen:" not in shown(console)


def test_a_sequence_with_an_unknown_graph_says_so(console: Console) -> None:
    seen = two_stages(prefill_ms=0.0)
    assert explain_plan(console, plan_for(seen), limit=40)
    text = " ".join(shown(console).split())
    assert "then prefill/t64 (not measured) serves slot 5; service " in text
    assert "not divided by a time that is not known" in text
    assert "1.50 + ?" in text
    assert "then prefill/t64 wins: its duration is not known yet" in text


def test_the_sentence_tells_a_refresh() -> None:
    old = msgspec.structs.replace(graph(decode_shape(1), 5.0), stale=True)
    seen = view([old, graph(decode_shape(2), 6.0)], [decoder(0), decoder(1)], refresh_funded=True)
    text = sentence(seen)
    assert (
        text
        == "decode/b1 for slot 0 wins: its duration is stale, and the refresh ledger has paid for measuring it again."
    )
    displaced = select(seen, explain=True).candidates[0]
    assert (displaced.shape, displaced.lost) == (decode_shape(2), "displaced by a stale graph that is measured again")


def test_a_trace_without_views_is_refused_with_the_remedy(tmp_path: Path, console: Console) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [msgspec.structs.replace(plan, view=msgspec.UNSET) for plan in committed(2)])
    with pytest.raises(TraceError, match="--trace-views"):
        check_all(console, path)


def test_a_line_that_a_crash_cut_is_passed_over_and_any_other_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, committed(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert [plan.n for plan in read_plans(path)] == [1, 2]
    path.write_bytes(whole + b'{"event":"plan.committed","n":"four"}\n')
    with pytest.raises(TraceError, match="line 5"):
        list(read_plans(path))


def test_a_plan_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, committed(3))
    assert find_plan(path, 2).n == 2
    with pytest.raises(TraceError, match="has plans 1 to 3, not plan 9"):
        find_plan(path, 9)
    path.write_text("")
    with pytest.raises(TraceError, match="has no committed plan"):
        find_plan(path, 1)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--plan", "2"], 0),
        (["--all"], 0),
        (["--plan", "9"], 2),
        ([], 2),
        (["--plan", "1", "--all"], 2),
    ],
)
def test_the_command_ends_with_a_telling_status(tmp_path: Path, arguments: list[str], status: int) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, committed(3))
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(path), *arguments])
    assert ended.value.code == status


def test_the_command_fails_when_a_decision_differs(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [msgspec.structs.replace(plan, duration_ns=plan.duration_ns + 1) for plan in committed(1)])
    for arguments in (["--plan", "1"], ["--all"]):
        with pytest.raises(SystemExit) as ended:
            main(["explain", str(path), *arguments])
        assert ended.value.code == 1


def test_a_probe_and_the_rows_of_ragged_programs_are_told(tmp_path: Path, console: Console) -> None:
    survival = (0.5, 0.25, 0.125)
    row = msgspec.structs.replace(decoder(0, survival=survival), optimistic=(1.0,) * 3, weights=(2.0,) * 3)
    graphs = [graph(decode_shape(1), 10.0), graph(packed_round(1, 4, 4), 20.0), graph(packed_round(2, 4, 5), 40.0)]
    seen = msgspec.structs.replace(view(graphs, [row, decoder(1, survival=survival)]), device_allocates=True)
    assert "speculative/b2d3w4p5 for slots 0, 1" in {
        f"{c.shape.name} for slots {', '.join(map(str, c.slots))}" for c in select(seen, explain=True).candidates
    }
    assert explain_plan(console, plan_for(seen), 40)
    assert " ~3 2 " in shown(console)
    seen = msgspec.structs.replace(seen, requests=(row,), probe_funded=True)
    assert "the probe ledger has paid for learning how many of its proposals are accepted" in sentence(seen)
    path = tmp_path / "trace.jsonl"
    write_trace(path, [plan_for(seen)])
    assert check_all(console, path)
