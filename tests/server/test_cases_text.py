"""Text, stops and lengths with the real model: inputs that have broken servers before, and the right answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .events import error_of, texts
from .model_server import ALPHA, BADUTF, COUNT, JP, REFERENCE, SUM, ModelServer, run_model


def test_the_reference_tokens(server: ModelServer) -> None:
    for prompt, tokens, length in ((COUNT, 14, 64), (JP, 24, 64), (ALPHA, 7, 14)):
        name = {COUNT: "count", JP: "jp", ALPHA: "alpha"}[prompt]
        expected = server.client.post("/detokenize", json={"tokens": REFERENCE[name]["out"][:length]}).json()["prompt"]
        answer = server.complete(prompt, max_tokens=length)
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"] == {
            "prompt_tokens": tokens,
            "completion_tokens": length,
            "total_tokens": tokens + length,
        }


def test_characters_of_several_tokens_arrive_whole(server: ModelServer) -> None:
    assert server.both_ways(JP, max_tokens=12) == ("日本語日本語", "length", 12)
    events = server.stream(JP, max_tokens=12)
    pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(pieces) == "日本語日本語", "a round may bring several of them, and parts of none"


def test_bytes_that_are_never_text(server: ModelServer) -> None:
    assert server.both_ways(BADUTF, max_tokens=24) == ("\ufffd" * 12, "length", 24)
    assert server.complete(COUNT, max_tokens=2)["choices"][0]["text"] == " 6"


@pytest.mark.parametrize(("max_tokens", "text"), [(1, "\ufffd"), (2, "日"), (3, "日本"), (6, "日本語")])
def test_a_limit_inside_a_character(server: ModelServer, max_tokens: int, text: str) -> None:
    assert server.both_ways(JP, max_tokens=max_tokens) == (text, "length", max_tokens)


@pytest.mark.parametrize("max_tokens", [4, 5])
def test_a_limit_inside_a_longer_character(server: ModelServer, max_tokens: int) -> None:
    assert server.both_ways(JP, max_tokens=max_tokens) == ("日本\ufffd", "length", max_tokens)


@pytest.mark.parametrize(
    ("prompt", "stop", "text"),
    [
        (ALPHA, "DEFGHIJ", ""),
        (ALPHA, "DE", ""),
        (ALPHA, "EF", "D"),
        (ALPHA, "HI", "DEFG"),
        (COUNT, ", 8", " 6, 7"),
        (COUNT, "8", " 6, 7, "),
    ],
)
def test_stop_strings_cut_at_the_character(server: ModelServer, prompt: str, stop: str, text: str) -> None:
    found, reason, _ = server.both_ways(prompt, stop=[stop], max_tokens=20)
    assert (found, reason) == (text, "stop")


def test_text_held_for_a_stop_string_is_not_lost(server: ModelServer) -> None:
    assert server.both_ways(COUNT, stop=[", 9, X"], max_tokens=12) == (" 6, 7, 8, 9,", "length", 12)


def test_a_stop_string_that_never_begins_holds_nothing(server: ModelServer) -> None:
    plain = server.stream(COUNT, max_tokens=12)
    stopped = server.stream(COUNT, max_tokens=12, stop=["Z" * 16])
    for events in (plain, stopped):  # a round may bring several tokens at once
        pieces = [event["choices"][0]["text"] for event in events]
        assert len(pieces) > 1
        assert all(pieces), "each has the text of its tokens"
    assert texts(plain) == texts(stopped)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_stop_wins_over_the_limit(server: ModelServer, max_tokens: int) -> None:
    text, reason, tokens = server.both_ways(COUNT, stop=["8"], max_tokens=max_tokens)
    assert text == " 6, 7, 8"[:max_tokens].removesuffix("8")
    assert (reason, tokens) == (("length", max_tokens) if max_tokens < 8 else ("stop", 8))


def test_how_stops_may_be_written(server: ModelServer) -> None:
    harmless: list[object] = ["x", None, []]
    for stop in harmless:
        assert server.complete(COUNT, stop=stop, max_tokens=2)["choices"][0]["text"] == " 6"
    for bad in (["a"] * 17, [""], ""):
        error_of(server.client.post("/v1/completions", json={"prompt": COUNT, "stop": bad}), 400, "stop")


def test_the_end_of_an_answer(server: ModelServer) -> None:
    events = server.stream_chat(SUM, stream_options={"include_usage": True})
    assert texts(events) == ["The answer to this classic math problem is 4."]
    choices = [choice for event in events for choice in event["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert events[-1]["usage"] == {"prompt_tokens": 37, "completion_tokens": 12, "total_tokens": 49}
    assert all(event["usage"] is None for event in events[:-1])
    events = server.stream(COUNT, max_tokens=3)
    *before, last = [event["choices"][0]["finish_reason"] for event in events]
    assert (set(before) <= {None}, last) == (True, "length"), "a round may bring several tokens in one event"


def test_stop_token_ids(server: ModelServer) -> None:
    choice = server.complete(COUNT, stop_token_ids=[28], max_tokens=20)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 28)
    assert choice["text"] == " 6"
    most: dict[str, object] = {
        "stop_token_ids": list(range(1000, 1064)),
        "logit_bias": {str(token): -1 for token in range(2000, 3024)},
        "logprobs": 20,
    }
    choice = server.complete(COUNT, max_tokens=3, **most)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" 6,", "length")


def test_tokens_at_the_edge_of_nothing(server: ModelServer) -> None:
    assert server.both_ways(COUNT, max_tokens=0) == ("", "length", 0)
    assert server.both_ways(COUNT, max_tokens=0, echo=True) == (COUNT, "length", 0)
    assert server.both_ways(COUNT, max_tokens=1) == (" ", "length", 1)
    assert server.both_ways(COUNT, max_tokens=1, echo=True) == (COUNT + " ", "length", 1)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
def test_an_empty_prompt(server: ModelServer, prompt: object) -> None:
    error_of(server.client.post("/v1/completions", json={"prompt": prompt}), 400, "prompt")
    assert server.complete(COUNT, max_tokens=2)["choices"][0]["text"] == " 6"


@pytest.fixture(scope="module")
def narrow(default_model_path: object) -> Iterator[ModelServer]:
    """A context of 64 tokens."""
    options = ("--max-model-len", "64", "--max-num-seqs", "1", "--max-prefill-tokens", "64", "--kv-memory", "64MiB")
    with run_model(*options, "--eager") as running:
        yield running


def the(count: int) -> str:
    """A prompt of exactly `count` tokens."""
    return " the" * count


def post(server: ModelServer, **fields: object) -> httpx.Response:
    return server.client.post("/v1/completions", json={"temperature": 0, **fields})


def test_a_prompt_that_fills_the_context(narrow: ModelServer) -> None:
    _, reason, tokens = narrow.both_ways(the(63))
    assert (reason, tokens) == ("length", 1)
    _, reason, tokens = narrow.both_ways(the(62))
    assert (reason, tokens) == ("length", 2)
    for count in (64, 65):
        error_of(post(narrow, prompt=the(count)), 400, "prompt")
    error_of(post(narrow, prompt=the(63), max_tokens=2), 400, "max_tokens")


def test_a_refused_prompt_holds_nobody_up(narrow: ModelServer) -> None:
    error_of(post(narrow, prompt=the(65)), 400, "prompt")
    assert narrow.complete(COUNT, max_tokens=8)["choices"][0]["text"] == " 6, 7, 8"


def test_scores_of_a_prompt_that_fills_the_context(narrow: ModelServer) -> None:
    answer = narrow.complete(the(64), max_tokens=0, echo=True, logprobs=1)
    assert answer["choices"][0]["text"] == the(64)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 64
    assert narrow.complete(COUNT, max_tokens=2)["choices"][0]["text"] == " 6"
