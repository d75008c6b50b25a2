"""The trace: its lines, their order, what is lost and when, and that a crash leaves whole lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from flare.machines.ids import Fence, RequestHandle, RequestId
from flare.trace import TraceWriter, open_trace
from flare.trace_events import (
    FrameCompleted,
    LedgerTransition,
    RequestTransition,
    SlotTransition,
    TraceEvent,
    TraceOpened,
    WindowTransition,
)

from .traces import committed


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def transition(number: int) -> RequestTransition:
    return RequestTransition(number, RequestId(number), RequestHandle(1, number), "queued", "prefilling", "Admit")


def written(path: Path) -> TraceWriter:
    writer = open_trace(path)
    assert writer is not None
    return writer


def test_events_are_json_lines_in_order_after_one_that_relates_the_clocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = written(path)
    for number in range(1000):
        writer.emit(transition(number))
    writer.close()
    first, *rest = lines_of(path)
    assert first["event"] == "trace.opened"
    assert isinstance(first["at_ns"], int)
    assert isinstance(first["wall_ns"], int)
    assert [line["at_ns"] for line in rest] == list(range(1000))
    assert rest[5] == {
        "event": "request.transition",
        "at_ns": 5,
        "request": 5,
        "handle": [1, 5],
        "before": "queued",
        "after": "prefilling",
        "cause": "Admit",
    }


def test_every_event_comes_back_as_it_was() -> None:
    events: list[TraceEvent] = [
        TraceOpened(1, 2),
        transition(3),
        RequestTransition(3, RequestId(1), None, "new", "queued", "Arrive"),
        SlotTransition(4, 1, Fence(9), "free", "committed", "Commit"),
        WindowTransition(4, RequestId(1), "filling", "active", "Filled"),
        LedgerTransition(4, "refresh", "open", "debt", "Overdrawn", -3_000_000),
        FrameCompleted(5, Fence(9), "decode/b4", 8_000_000, 9_000_000, 4, None),
        FrameCompleted(5, Fence(9), "decode/b4", 0, 9_000_000, 0, "out of memory"),
        *committed(20),
    ]
    decode = msgspec.json.Decoder(TraceEvent).decode
    assert [decode(msgspec.json.encode(event)) for event in events] == events


def test_a_plan_without_its_view_has_no_such_key() -> None:
    event = msgspec.structs.replace(committed(1)[0], view=msgspec.UNSET)
    line = msgspec.to_builtins(event)
    assert "view" not in line
    assert {"n", "fence", "shape", "lanes", "score", "log_scale", "reason", "exploration_credit", "ages_ms"} <= set(
        line
    )


def test_lines_reach_the_file_without_a_close(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = written(path)
    writer.emit(transition(7))
    deadline = time.monotonic() + 30
    while b"prefilling" not in path.read_bytes():
        assert time.monotonic() < deadline, "the writer never flushed"
        time.sleep(0.01)
    writer.close()


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_a_process_that_ends_without_closing_leaves_whole_lines(tmp_path: Path, ending: str, status: int) -> None:
    path = tmp_path / "trace.jsonl"
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from flare.trace import open_trace\n"
        "writer = open_trace(Path(sys.argv[1]))\n"
        "for number in range(20_000):\n"
        "    writer.emit({'event': 'a.b', 'number': number})\n"
        "    if number % 1000 == 0: time.sleep(0.03)\n"
        f"{ending}\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False, env={**os.environ})
    assert ended.returncode == status
    numbers = [line["number"] for line in lines_of(path)[1:]]
    assert numbers and numbers == list(range(len(numbers)))
    assert len(numbers) == 20_000 or status == -9


def test_what_does_not_fit_is_counted_and_the_count_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    read_end, write_end = os.pipe()  # nobody reads: once it is full, the writing thread waits
    writer = TraceWriter([write_end], capacity=10)
    writer.emit({"event": "a.big", "text": "x" * 1_000_000})
    for number in range(100_000):
        writer.emit({"event": "a.b", "number": number})
    received = bytearray()
    reader = threading.Thread(target=lambda: received.extend(_read_all(read_end)))
    reader.start()
    writer.close()
    reader.join()
    path.write_bytes(received)
    lines = lines_of(path)
    kept = sum(1 for line in lines if line["event"] == "a.b")
    lost = sum(int(str(line["events"])) for line in lines if line["event"] == "trace.dropped")
    assert lost > 0
    assert kept + lost == 100_000


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_file_that_fails_is_given_up_and_the_log_says_so() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with capture_logs() as log:
        writer = TraceWriter([write_end])
        writer.emit(transition(1))
        writer.close()
        os.close(write_end)
    assert [line["event"] for line in log] == ["trace.failed"]


def test_what_cannot_go_to_json_is_still_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = written(path)
    writer.emit({"event": "a.b", "text": "\ud800"})
    writer.emit({"event": "a.b", "object": RuntimeError("x")})
    writer.close()
    _, surrogate, thing = lines_of(path)
    assert surrogate["event"] == "trace.unencodable"
    assert "\\ud800" in str(surrogate["of"])
    assert thing["object"] == "RuntimeError('x')"


def test_closing_twice_is_harmless_and_no_target_is_no_writer(tmp_path: Path) -> None:
    writer = written(tmp_path / "trace.jsonl")
    writer.close()
    writer.close()
    assert open_trace(None) is None
    with pytest.raises(OSError, match="nowhere"):
        open_trace(tmp_path / "nowhere" / "trace.jsonl")
