"""What the engine tells of itself: each effect becomes its line, and each frame goes to its account."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.engine.reporting import Reporter
from flare.machines.durations import DurationTable
from flare.machines.events import Effect, FrameCounted, LedgerMoved, RequestMoved, SlotMoved, WindowMoved
from flare.machines.graph import GraphKind, GraphShape, Source, rectangular
from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.machines.selection.view import Reason
from flare.metrics import Metrics
from flare.trace import open_trace

DECODE = GraphShape(GraphKind.DECODE, 4)
ONE, TWO = RequestId(1), Fence(2)


def counted(reason: Reason) -> FrameCounted:
    return FrameCounted(TWO, DECODE, reason, 8_000_000, 9_000_000, 0, 4, None)


def test_every_move_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = open_trace(path)
    effects: list[Effect] = [
        RequestMoved(ONE, RequestHandle(0, 1), "prefilling", "preparing", "Blocked"),
        WindowMoved(ONE, "filling", "active", "Filled"),
        SlotMoved(1, TWO, "free", "committed", "Commit"),
        LedgerMoved("refresh", "open", "debt", "Overdrawn", -3),
        counted(Reason.ORDINARY),
    ]
    Reporter(Metrics("m"), DurationTable([DECODE], 10**9), trace, views=False).effects(effects, 5)
    assert trace is not None
    trace.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [line.pop("event") for line in lines] == [
        *("request.transition", "window.transition", "slot.transition", "ledger.transition", "frame.completed")
    ]
    assert lines[1] == {"at_ns": 5, "request": 1, "before": "filling", "after": "active", "cause": "Filled"}
    ledger = {"ledger": "refresh", "before": "open", "after": "debt", "cause": "Overdrawn", "credit_ns": -3}
    assert lines[3] == {"at_ns": 5, **ledger}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_account(reason: Reason) -> None:
    metrics = Metrics("m")
    Reporter(metrics, DurationTable([DECODE], 10**9), None, views=False).effects([counted(reason)], 5)
    text = metrics.render().decode()
    for other in Reason:
        expected, account = float(other is reason), other.value.replace("probe", "learning")
        assert f'flare_scheduler_executions_total{{execution="{account}"}} {expected}' in text
        nanoseconds = "8e+06" if other is reason else "0.0"
        assert f'flare_scheduler_execution_nanoseconds_total{{execution="{account}"}} {nanoseconds}' in text


def test_rounds_are_counted_by_source_and_depth() -> None:
    metrics, shape = Metrics("m"), rectangular(GraphKind.SPECULATIVE, 4, 4, source=Source.COPY)
    reporter = Reporter(metrics, DurationTable([shape], 10**9), None, views=False)
    rounds = ((4, 3), (2, 1), (3, 3))
    reporter.effects([FrameCounted(Fence(1), shape, Reason.ORDINARY, 5, 6, 0, 7, None, rounds)], 5)
    text = metrics.render().decode()
    for name, count in (("programs", 1), ("rounds", 3), ("proposed_tokens", 6), ("accepted_tokens", 4)):
        assert f'flare_speculative_{name}_total{{source="copy"}} {count}.0' in text
        assert f'flare_speculative_{name}_total{{source="draft"}} 0.0' in text
    for depth in (1, 2):
        assert f'accepted_tokens_per_depth_total{{depth="{depth}",source="copy"}} 2.0' in text
    assert 'flare:spec_decode_num_accepted_tokens_total{model_name="m"} 4.0' in text
