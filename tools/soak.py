"""Random load on a `flare run` of its own, then a look for leaks: `python tools/soak.py --minutes 10 [-- RUN OPTIONS]`.

Owns the load (mixed lengths, disconnects in every stage, bad requests, streams and whole answers), the server process
that bears it, and the checks afterwards: gauges at 0, no page, file or thread kept, resident memory steady. Surprising
rule: the load is a pure function of `--seed`, but what meets what in the server is not; a failure is a finding all the
same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TEXT = "the cat sat on a mat and read one two three red blue green books about ships stars rivers while it rained"
READY_S = 300.0
ANSWER_S = 300.0
SETTLE_S = 10.0
ERROR = re.compile(r"\[error|\[critical|Traceback|Exception ignored|never retrieved|was never awaited")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Wrong(Exception):
    """An answer that the server should not have given."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: its status, and as much of its body as was read."""

    status: int
    body: bytes


@dataclass(slots=True)
class Load:
    """Random clients of one server."""

    port: int
    until_s: float
    counts: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    tokens: int = 0

    async def client(self, seed: int) -> None:
        """One client: an action after another until the time is up."""
        rng = random.Random(seed)
        actions = [self.whole, self.stream, self.leave_stream, self.leave_whole, self.leave_early, self.bad]
        while time.monotonic() < self.until_s:
            (action,) = rng.choices(actions, weights=[3, 4, 4, 3, 1, 3])
            name = action.__name__
            try:
                async with asyncio.timeout(ANSWER_S):
                    self.counts[f"{name}: {await action(rng)}"] += 1
            except (Wrong, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
                self.wrongs.append(f"{name} (client seed {seed}): {type(error).__name__}: {error}")
                self.counts[f"{name}: WRONG"] += 1
            if rng.random() < 0.3:
                await asyncio.sleep(rng.expovariate(2.0))

    async def whole(self, rng: random.Random) -> str:
        """An answer in one piece, read to its end."""
        path, request = generation(rng, stream=False)
        answer = await exchange(self.port, path, json.dumps(request).encode())
        if answer.status == 503:
            return "503"
        expect(answer.status == 200, f"status {answer.status}: {answer.body[:200]!r}")
        response = json.loads(answer.body)
        expect(len(response["choices"]) == request["n"], "not one choice for each of n")
        self.check_usage(request, response["usage"])
        return "200"

    async def stream(self, rng: random.Random) -> str:
        """A stream, read to its end."""
        path, request = generation(rng, stream=True)
        answer = await exchange(self.port, path, json.dumps(request).encode())
        if answer.status == 503:
            return "503"
        expect(answer.status == 200, f"status {answer.status}: {answer.body[:200]!r}")
        events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        expect(bool(events) and events[-1].strip() == b"[DONE]", f"no [DONE]; it ends {answer.body[-200:]!r}")
        chunks = [json.loads(event) for event in events[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        expect(sum(reason is not None for reason in reasons) == request["n"], "not one finish for each of n")
        self.check_usage(request, chunks[-1]["usage"])
        return "200"

    def check_usage(self, request: dict[str, object], usage: dict[str, int]) -> None:
        """The tokens of an answer are within what was asked for."""
        tokens, limit = usage["completion_tokens"], int(str(request["max_tokens"])) * int(str(request["n"]))
        expect(0 < tokens <= limit, f"{tokens} tokens where at most {limit} were asked for")
        expect(tokens == limit or not request["ignore_eos"] or "stop" in request, f"{tokens} tokens instead of {limit}")
        self.tokens += tokens

    async def leave_stream(self, rng: random.Random) -> str:
        """A stream that its reader leaves after some of it (perhaps before its first byte)."""
        path, request = generation(rng, stream=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head("POST", path, json.dumps(request).encode()))
        for _ in range(rng.choice([0, 0, 1, 2, 5, 40])):
            if not await reader.readline():
                break
        return await leave(writer, rng)

    async def leave_whole(self, rng: random.Random) -> str:
        """An answer in one piece that nobody waits for."""
        path, request = generation(rng, stream=False)
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head("POST", path, json.dumps(request).encode()))
        await writer.drain()
        await asyncio.sleep(rng.choice([0.0, 0.01, 0.1, 0.5, 2.0]) * rng.random())
        return await leave(writer, rng)

    async def leave_early(self, rng: random.Random) -> str:
        """A request of which only a part is sent."""
        path, request = generation(rng, stream=rng.random() < 0.5)
        message = head("POST", path, json.dumps(request).encode())
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(message[: rng.randrange(len(message))])
        await asyncio.sleep(rng.random() * 0.2)
        return await leave(writer, rng)

    async def bad(self, rng: random.Random) -> str:
        """A request that must be refused, with an error in the OpenAI shape."""
        method, path, body = bad_request(rng)
        answer = await exchange(self.port, path, body, method)
        expect(400 <= answer.status < 500, f"status {answer.status} for {method} {path} {body[:200]!r}")
        error = json.loads(answer.body)["error"]
        expect(set(error) == {"message", "type", "param", "code"}, f"error of shape {error!r}")
        return str(answer.status)


def expect(condition: bool, why: str) -> None:
    """Raise `Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(why)


def generation(rng: random.Random, *, stream: bool) -> tuple[str, dict[str, object]]:
    """A good request: its path and its body."""
    words = rng.choice([1, 5, 20, 60, 200, 700, 1500])
    text = " ".join(rng.choice(TEXT.split()) for _ in range(rng.randint(1, words)))
    request: dict[str, object] = {
        "max_tokens": rng.choice([1, 2, 8, 24, 60, 120]),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
        "temperature": rng.choice([0, 0.7, 1.0]),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.7,
        "stream": stream,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        request["stop"] = rng.sample(["zebra", ".", " the", "\n\n", "one two"], 2)
    if rng.random() < 0.2:
        request["frequency_penalty"] = 0.5
    if rng.random() < 0.1:
        request["logit_bias"] = {"216": -100}
    if rng.random() < 0.5:
        if rng.random() < 0.2:
            request |= {"logprobs": True, "top_logprobs": 2}
        return "/v1/chat/completions", request | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.2:
        request |= {"logprobs": 2, "echo": rng.random() < 0.3}
    return "/v1/completions", request | {"prompt": text}


def bad_request(rng: random.Random) -> tuple[str, str, bytes]:
    """Method, path and body of a request that has one thing wrong."""
    raw = [b"", b"{", b"[]", b"null", b'"s"', b"\xff\xfe", b'{"prompt":"a"', b'{"prompt":"a","temperature":NaN}']
    values: list[tuple[str, object]] = [
        ("prompt", ""),
        ("prompt", [[]]),
        ("prompt", 5),
        ("prompt", [10**9]),
        ("max_tokens", "3"),
        ("max_tokens", -1),
        ("max_tokens", 10**9),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", -5),
        ("top_p", 2),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("n", 0),
        ("n", 10**6),
        ("logit_bias", {"99999999": 5}),
        ("logprobs", 10**4),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "banana"}),
        ("model", "no-such-model"),
    ]
    kind = rng.randrange(4)
    if kind == 0:
        return "POST", "/v1/completions", rng.choice(raw)
    if kind == 1:
        return rng.choice(["GET", "PUT", "DELETE"]), "/v1/completions", b""
    if kind == 2:
        return "POST", rng.choice(["/", "/v1/nothing", "/v1/completions/x"]), b"{}"
    key, value = rng.choice(values)
    return "POST", "/v1/completions", json.dumps({"prompt": "one two", "max_tokens": 2} | {key: value}).encode()


def head(method: str, path: str, body: bytes) -> bytes:
    """A whole request message."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body


async def exchange(port: int, path: str, body: bytes = b"", method: str = "POST") -> Answer:
    """Send a request and read the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head(method, path, body))
        message = await reader.read()
    finally:
        writer.close()
    status_line, _, rest = message.partition(b"\r\n")
    if not status_line.startswith(b"HTTP/1.1 "):
        raise Wrong(f"not an HTTP answer: {message[:100]!r}")
    headers, _, content = rest.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in headers.lower():
        content = dechunked(content)
    return Answer(int(status_line[9:12]), content)


def dechunked(content: bytes) -> bytes:
    """The body of a chunked message; anything else is given back as it is."""
    pieces: list[bytes] = []
    rest = content
    while rest:
        size_line, separator, after = rest.partition(b"\r\n")
        try:
            size = int(size_line, 16)
        except ValueError:
            return content
        if not separator:
            return content
        if size == 0:
            return b"".join(pieces)
        pieces.append(after[:size])
        rest = after[size + 2 :]
    return b"".join(pieces) or content


async def leave(writer: asyncio.StreamWriter, rng: random.Random) -> str:
    """Leave a connection politely, or by a reset."""
    if rng.random() < 0.5:
        writer.transport.abort()
        return "reset"
    writer.close()
    return "closed"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no VmRSS of process {pid}")


def held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


async def gauges(port: int) -> dict[str, float]:
    """The gauges that must be 0 when nothing is served."""
    text = (await exchange(port, "/metrics", method="GET")).body.decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("flare:")]
    values = {name.split("{")[0].removeprefix("flare:"): float(value) for name, value in lines}
    return {name: values[name] for name in GAUGES}


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if await condition():
            return True
        await asyncio.sleep(0.1)
    return False


async def soak(arguments: argparse.Namespace) -> list[str]:
    """The whole run. Returns what was found wrong."""
    port = free_port()
    command = [sys.executable, "-m", "flare", "run", "--port", str(port), *arguments.options]
    with arguments.server_log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

    async def ready() -> bool:
        if process.returncode is not None:
            raise SystemExit(f"the server ended with {process.returncode} before it was ready")
        try:
            return (await exchange(port, "/health", method="GET")).status == 200
        except (OSError, Wrong):
            return False

    try:
        if not await until(ready, READY_S):
            return [f"the server is not ready after {READY_S:.0f} s"]
        found = await under_load(arguments, port, process.pid) + await stopped(process)
        errors = [line for line in arguments.server_log.read_text().splitlines() if ERROR.search(line)]
        return found + [f"in the server's log: {line}" for line in errors[:10]]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def under_load(arguments: argparse.Namespace, port: int, pid: int) -> list[str]:
    """The load, the memory each minute, and the checks afterwards."""
    await exchange(port, "/v1/completions", json.dumps({"prompt": "one", "max_tokens": 2}).encode())
    before = held(pid)
    load = Load(port, time.monotonic() + 60 * arguments.minutes)
    resident: list[float] = []
    async with asyncio.TaskGroup() as group:
        for index in range(arguments.clients):
            group.create_task(load.client(arguments.seed * 1000 + index))
        for minute in range(1, int(arguments.minutes) + 1):
            await asyncio.sleep(max(0.0, load.until_s - 60 * (arguments.minutes - minute) - time.monotonic()))
            resident.append(resident_mib(pid))
            print(
                f"minute {minute:3}: {resident[-1]:8.1f} MiB, {load.tokens} tokens, {len(load.wrongs)} wrong",
                flush=True,
            )
    for name, count in sorted(load.counts.items()):
        print(f"{count:8} {name}")
    found = load.wrongs[:20]

    async def at_rest() -> bool:
        return not any((await gauges(port)).values())

    if not await until(at_rest, SETTLE_S):
        found.append(f"gauges {SETTLE_S:.0f} s after the load: {await gauges(port)}")
    after = held(pid)
    print(f"open files {before[0]} -> {after[0]}, threads {before[1]} -> {after[1]}")
    if after[0] > before[0] + 2:
        found.append(f"open files rose from {before[0]} to {after[0]}")
    if len(resident) > 2:
        growth = resident[-1] / resident[1] - 1
        print(f"resident memory, last minute against minute 2: {growth:+.2%}")
        if growth > 0.05:
            found.append(f"resident memory grew by {growth:.1%} after minute 2")
    return found


async def stopped(process: asyncio.subprocess.Process) -> list[str]:
    """Ask an idle server to stop."""
    process.send_signal(signal.SIGTERM)
    try:
        code = await asyncio.wait_for(process.wait(), 30)
    except TimeoutError:
        return ["the idle server did not stop within 30 s of SIGTERM"]
    return [] if code == 0 else [f"the server ended with {code} after SIGTERM"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server-log", type=Path, default=Path("soak-server.log"), help="takes what the server writes")
    parser.add_argument("options", nargs="*", help="options of `flare run`, after --")
    found = asyncio.run(soak(parser.parse_args(argv)))
    for each in found:
        print(f"WRONG {each}")
    print("nothing wrong" if not found else f"{len(found)} wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
