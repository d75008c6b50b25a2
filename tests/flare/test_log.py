"""The log: lines for people, lines for machines, and its copy in the trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from flare.log import configure_logging
from flare.trace import TraceWriter, open_trace


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers = handlers
    structlog.reset_defaults()


def test_people_read_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    structlog.get_logger().info("server.ready", url="http://127.0.0.1:8000")
    shown = capsys.readouterr()
    assert "server.ready" in shown.err
    assert "url=http://127.0.0.1:8000" in shown.err
    assert not shown.out
    assert not shown.err.startswith("{")


def test_machines_read_json_that_begins_with_the_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json_lines=True)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        structlog.get_logger().exception("engine.failed", frame=7)
    line = capsys.readouterr().err
    assert line.startswith('{"event":"engine.failed",')
    fields = json.loads(line)
    assert (fields["frame"], fields["level"]) == (7, "error")
    assert "RuntimeError: broken" in fields["exception"]


def test_what_libraries_log_is_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """An HTTP server's warning of a client's fault once stood among the JSON lines as bare text."""
    configure_logging(json_lines=True)
    configure_logging(json_lines=True)
    logging.getLogger("some.library").warning("no more than %d\n", 3)
    logging.getLogger("some.library").info("chatter")
    (line,) = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["level"]) == ("library.message", "warning")
    assert (fields["library"], fields["message"]) == ("some.library", "no more than 3")


def test_a_trace_has_the_log_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    trace = open_trace(path)
    assert trace is not None
    configure_logging(trace=trace)
    structlog.get_logger().warning("device.slow", ms=12)
    trace.close()
    structlog.get_logger().info("server.stopped")
    shown = capsys.readouterr().err
    assert "device.slow" in shown
    assert "server.stopped" in shown
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["event"], line["ms"], line["level"]) == ("device.slow", 12, "warning")


def test_a_trace_on_standard_error_writes_each_line_once(capfd: pytest.CaptureFixture[str]) -> None:
    trace = TraceWriter([2])
    configure_logging(json_lines=True, trace=trace)
    structlog.get_logger().info("server.ready")
    trace.close()
    structlog.get_logger().info("server.stopped")
    events = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert events == ["trace.opened", "server.ready", "server.stopped"]
