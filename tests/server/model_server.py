"""`flare run` as users start it: a process of its own, the default model, real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from .events import Json, read_events, texts

ROOT = Path(__file__).resolve().parents[2]
REFERENCE: dict[str, Json] = json.loads((ROOT / "tests/data/smollm2_135m_q4_1_greedy.json").read_text())

READY_S_MAX = 600.0
END_S_MAX = 120.0

COUNT = "1, 2, 3, 4, 5,"
ALPHA = "Here is the English alphabet: ABC"
JP = "日本語" * 4
BADUTF = "🙂" * 8
SUM = "What is 2+2?"
ECHO3 = "Repeat exactly: alpha beta gamma"


@dataclass(frozen=True)
class ModelServer:
    """A running `flare run`."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: BinaryIO

    def complete(self, prompt: object, **fields: Any) -> Json:
        """A greedy completion, whole."""
        response = self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def chat(self, content: object, **fields: Any) -> Json:
        """A greedy answer to one user message, whole."""
        response = self.client.post("/v1/chat/completions", json=chat_body(content, **fields))
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def stream(self, prompt: object, **fields: Any) -> list[Json]:
        """The events of a greedy completion."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, **fields}
        return read_events(self.client.post("/v1/completions", json=body))

    def stream_chat(self, content: object, **fields: Any) -> list[Json]:
        """The events of a greedy answer."""
        return read_events(self.client.post("/v1/chat/completions", json=chat_body(content, stream=True, **fields)))

    def both_ways(self, prompt: object, **fields: Any) -> tuple[str, str, int]:
        """Text, finish reason and completion tokens, the same whole and streamed."""
        whole = self.complete(prompt, **fields)
        choice, usage = whole["choices"][0], whole["usage"]
        events = self.stream(prompt, **fields, stream_options={"include_usage": True})
        assert texts(events) == [choice["text"]]
        reasons = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert events[-1]["usage"] == usage
        return choice["text"], choice["finish_reason"], usage["completion_tokens"]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and all(f'{key}="{value}"' in found[2] for key, value in labels.items()):
                total += float(found[3])
        return total

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds a page, by the gauges."""
        names = ("flare:num_requests_running", "flare:num_requests_waiting", "flare:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def ended(self) -> int:
        """The exit status, once the process ends."""
        return self.process.wait(END_S_MAX)


def chat_body(content: object, **fields: Any) -> Json:
    """A greedy chat request of one user message."""
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def eventually(holds: Any, within_s: float = END_S_MAX) -> None:
    """Wait until it holds; the limit only ends a test that fails."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def run_model(*options: str, serving: bool = True) -> Iterator[ModelServer]:
    """`flare run` with these options on a free port, ready to serve or just answering; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "flare", "run", "--port", str(port), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLARE_DEVICE": "cpu"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tempfile.gettempdir())
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                server = ModelServer(process, client, log)
                _await_answer(server, (200,) if serving else (200, 503))
                yield server
        finally:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)


def _await_answer(server: ModelServer, statuses: tuple[int, ...]) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            server.log.seek(0)
            raise AssertionError(f"flare run did not start:\n{server.log.read().decode(errors='replace')[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            if server.client.get("/health").status_code in statuses:
                return
        time.sleep(0.05)
