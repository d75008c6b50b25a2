"""The log for people, and for machines that read logs (docs/observability.md, "Log").

Owns the set-up of structlog, and brings what libraries log into it. Does not own the scheduler's events, which go to
the trace. Surprising rule: with a trace, every line of the log is an event of it as well, so that one file tells the
whole story.

Call `configure_logging` once, before the first line. Event names are `component.action`: `server.ready`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
import structlog
from structlog.typing import Processor

from .trace import TraceWriter


def configure_logging(*, json_lines: bool = False, trace: TraceWriter | None = None) -> None:
    """Send the log to standard error: coloured lines on a terminal, or JSON lines. `trace` gets every line too.

    With both, JSON lines on standard error are the trace's own affair (`open_trace(to_stderr=True)`), so that the
    scheduler's events and the log come in order from one writer.
    """
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if trace is not None:
        processors.append(_Tee(trace))
    if json_lines:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    else:
        processors.append(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,  # others print locals: prompts and keys
            )
        )
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, _FromLibraries)]
    root.addHandler(_FromLibraries())


class _FromLibraries(logging.Handler):
    """Lines of the standard library's logging, warnings and worse, become lines of this log."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno,
            "library.message",
            library=record.name,
            message=record.getMessage().strip(),
            exc_info=record.exc_info,
        )


class _Tee:
    """Copies each line of the log into the trace, and ends it there if the trace itself goes to standard error."""

    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace

    def __call__(self, logger: object, method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
        echoes = self._trace.echoes
        copy = dict(structlog.processors.format_exc_info(logger, method, dict(line)))
        self._trace.emit({"event": copy.pop("event"), **copy})
        if echoes:
            raise structlog.DropEvent
        return line


def _to_json(line: dict[str, Any], **_: object) -> str:
    return msgspec.json.encode({"event": line.pop("event"), **line}, enc_hook=repr).decode()
