"""Scheduling as clients see it: streams, long prompts and cancellations on an idle server with four slots.

Each test prints (pytest -s) the tokens of every answer, the gaps between its events as they arrived, and how often each
graph ran. Gaps are those of a client of HTTP: neither times of graphs nor latencies of tokens. FLARE_SCHEDULER_TEST_URL
names a server that runs already, such as http://127.0.0.1:8000; without it the default model is served in every mode.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event

import httpx
import pytest

from .events import Json
from .model_server import COUNT, run_model

URL = os.environ.get("FLARE_SCHEDULER_TEST_URL")
SLOTS = 4
OPTIONS = ("--max-num-seqs", str(SLOTS), "--max-prefill-tokens", "256", "--kv-memory", "512MiB")
MODES = {
    "ordinary": ("--speculative", "off"),
    "fixed": ("--speculative", "fixed:4"),
    "adaptive": ("--speculative", "adaptive"),
    "mixed": ("--speculative", "adaptive", "--mixed-prefill"),
}
OUTPUT_KINDS = ("decode", "mixed", "speculative")


def long_prompt(tokens: int) -> list[int]:
    """A prompt of exactly so many tokens, in ids that every vocabulary has."""
    return [100 + index % 50 for index in range(tokens)]


@dataclass
class Answer:
    """One streamed answer, complete unless its reader left."""

    prompt_tokens: int
    output_tokens: int
    finish: str | None
    gaps_ms: list[float]
    done: bool


class Reader:
    """A client that streams one completion; `started` is set with the first event, `leave` ends it early."""

    def __init__(self, client: httpx.Client, prompt: object, max_tokens: int) -> None:
        self.started, self.leave = Event(), Event()
        self._client = client
        self._body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self) -> Answer:
        """Read to the end, or until told to leave."""
        arrivals, finish, usage, done = list[float](), None, dict[str, int](), False
        with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if done := line == "data: [DONE]":
                    break
                event: Json = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    arrivals.append(time.perf_counter())
                    finish = choice["finish_reason"] or finish
                self.started.set()
                if self.leave.is_set():
                    break
        gaps_ms = [1e3 * (after - before) for before, after in itertools.pairwise(arrivals)]
        return Answer(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), finish, gaps_ms, done)


@dataclass(frozen=True)
class Ran:
    """How often each graph ran in a scenario."""

    graphs: list[Json]

    def frames(self, *kinds: str) -> int:
        """Frames of graphs of some kinds."""
        return sum(row["executions"] for row in self.graphs if row["kind"] in kinds)

    @property
    def prompt_room(self) -> int:
        """Prompt tokens that all frames together could consume."""
        return sum(row["executions"] * row["prefill_tokens"] for row in self.graphs)


@dataclass(frozen=True)
class Target:
    """The server under test, and threads for its clients."""

    client: httpx.Client
    pool: ThreadPoolExecutor

    def open(self, prompt: object, max_tokens: int) -> tuple[Reader, Future[Answer]]:
        """A stream in a thread of its own."""
        reader = Reader(self.client, prompt, max_tokens)
        return reader, self.pool.submit(reader.read)

    def graphs(self) -> list[Json]:
        """The prepared graphs, with their completed frames so far."""
        rows: list[Json] = self.client.get("/graphs").json()
        return rows

    def play(self, scenario: Callable[[], dict[str, Answer]]) -> tuple[dict[str, Answer], Ran]:
        """Named answers of a scenario, and how often each graph ran in it. Prints both."""
        before = self.graphs()
        answers = scenario()
        ran = Ran(
            [
                {**row, "executions": row["executions"] - was["executions"]}
                for row, was in zip(self.graphs(), before, strict=True)
            ]
        )
        print()
        for name, answer in answers.items():
            gaps = sorted(answer.gaps_ms) or [0.0]
            print(
                f"{name}: {answer.prompt_tokens} prompt and {answer.output_tokens} output tokens, "
                f"gaps median {gaps[len(gaps) // 2]:.0f}, longest {gaps[-1]:.0f} ms"
            )
        print("graphs:", ", ".join(f"{row['graph']} {row['executions']}" for row in ran.graphs if row["executions"]))
        return answers, ran


@pytest.fixture(scope="module", params=["url"] if URL else list(MODES))
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A server that serves nobody else."""
    with ExitStack() as stack:
        if URL:
            client = stack.enter_context(httpx.Client(base_url=URL, timeout=300))
            client.get("/health").raise_for_status()
        else:
            request.getfixturevalue("default_model_path")
            client = stack.enter_context(run_model(*OPTIONS, *MODES[request.param])).client
        yield Target(client, stack.enter_context(ThreadPoolExecutor(2 * SLOTS)))


def check_complete(answer: Answer, output_tokens: int, prompt_tokens: int | None = None) -> None:
    """It has all its tokens, its end, and nothing after that."""
    assert answer.done
    assert answer.finish == "length"
    assert answer.output_tokens == output_tokens
    assert prompt_tokens in (None, answer.prompt_tokens)


def test_concurrent_long_prompts(target: Target) -> None:
    """Every prompt token is consumed in some graph's room, and all are answered."""

    def scenario() -> dict[str, Answer]:
        opened = [target.open(long_prompt(700 + index), 4) for index in range(SLOTS)]
        return {f"prompt {index}": future.result() for index, (_, future) in enumerate(opened)}

    answers, ran = target.play(scenario)
    for index, answer in enumerate(answers.values()):
        check_complete(answer, 4, 700 + index)
    assert ran.prompt_room >= sum(answer.prompt_tokens for answer in answers.values())


@pytest.mark.parametrize("streams", [2, 4])
def test_decode_streams(target: Target, streams: int) -> None:
    """A frame gives a stream one token at most without speculation, and all of them share frames."""
    tokens = 48

    def scenario() -> dict[str, Answer]:
        opened = [target.open(COUNT, tokens) for _ in range(streams)]
        return {f"stream {index}": future.result() for index, (_, future) in enumerate(opened)}

    answers, ran = target.play(scenario)
    for answer in answers.values():
        check_complete(answer, tokens)
    assert ran.frames(*OUTPUT_KINDS) <= streams * tokens
    if not any("w1" not in row["graph"] for row in ran.graphs if row["executions"] and row["kind"] == "speculative"):
        assert ran.frames(*OUTPUT_KINDS) >= tokens - 1


def test_a_long_prompt_during_decode(target: Target) -> None:
    """Two streams run when it comes; nobody loses a token."""

    def scenario() -> dict[str, Answer]:
        opened = [target.open(COUNT, 64) for _ in range(2)]
        for reader, _ in opened:
            assert reader.started.wait(120)
        _, prompt = target.open(long_prompt(1_000), 8)
        return {"prompt": prompt.result(), **{f"stream {i}": future.result() for i, (_, future) in enumerate(opened)}}

    answers, ran = target.play(scenario)
    check_complete(answers.pop("prompt"), 8, 1_000)
    for answer in answers.values():
        check_complete(answer, 64)
    assert ran.prompt_room >= 1_000


def test_short_and_long_prompts_contend(target: Target) -> None:
    """More requests than slots, a long one first."""

    def scenario() -> dict[str, Answer]:
        opened = [target.open(long_prompt(tokens), 8) for tokens in (1_000, 20, 30, 40, 50, 60)]
        return {f"prompt {index}": future.result() for index, (_, future) in enumerate(opened)}

    answers, _ = target.play(scenario)
    for answer, tokens in zip(answers.values(), (1_000, 20, 30, 40, 50, 60), strict=True):
        check_complete(answer, 8, tokens)


def test_a_cancelled_slot_is_used_again(target: Target) -> None:
    """Three endless streams hold three slots, so that what comes after the fourth has left must have its slot."""

    def scenario() -> dict[str, Answer]:
        opened = [target.open(COUNT, 2_000) for _ in range(SLOTS)]
        try:
            for reader, _ in opened:
                assert reader.started.wait(120)
            (leaver, left), *others = opened
            leaver.leave.set()
            answers = {"left": left.result()}
            for index in range(2):
                answers[f"newcomer {index}"] = target.open(long_prompt(100 + index), 8)[1].result()
            assert not any(future.done() for _, future in others), "a stream ended early, or too soon to tell"
        finally:
            for reader, _ in opened:
                reader.leave.set()
        return {**answers, **{f"stream {index}": future.result() for index, (_, future) in enumerate(others)}}

    answers, _ = target.play(scenario)
    assert not answers["left"].done
    for index in range(2):
        check_complete(answers[f"newcomer {index}"], 8, 100 + index)
