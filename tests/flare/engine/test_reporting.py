"""What the engine tells of itself: each effect becomes its line, and each frame goes to its account."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.engine.reporting import Reporter
from flare.machines.durations import DurationTable
from flare.machines.events import Effect, FrameCounted, LedgerMoved, RequestMoved, SlotMoved, WindowMoved
from flare.machines.graph import GraphKind, GraphShape
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
        expected = float(other is reason)
        assert f'flare_scheduler_executions_total{{execution="{other.value}"}} {expected}' in text
        nanoseconds = "8e+06" if other is reason else "0.0"
        assert f'flare_scheduler_execution_nanoseconds_total{{execution="{other.value}"}} {nanoseconds}' in text
