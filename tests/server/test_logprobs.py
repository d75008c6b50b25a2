"""Log-probabilities and echo (docs/api.md, "Log-probabilities")."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.request import ScoredToken
from flare.server.logprobs import LOGPROB_MIN, chat_logprobs, completion_logprobs, text_offsets, token_string

from .events import Json, read_events
from .scripted_engine import text_script
from .serving import Served
from .tiny_tokens import ByteTokenizer

TOKENIZER = ByteTokenizer()


def complete(served: Served, **fields: object) -> Json:
    answer: Json = served.client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3, **fields}).json()
    choice: Json = answer["choices"][0]
    return choice


def test_completion_logprobs_count_from_the_prompt(served: Served) -> None:
    logprobs = complete(served, logprobs=2)["logprobs"]
    assert logprobs["tokens"] == ["h", "e", "l"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    assert logprobs["text_offset"] == [2, 3, 4]


def test_zero_alternatives_still_score_the_tokens(served: Served) -> None:
    logprobs = complete(served, logprobs=0)["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"] is None


def test_echo(served: Served) -> None:
    assert complete(served, echo=True)["text"] == "abhel"
    assert complete(served, echo=True, prompt=[97, 256])["text"] == "a<|im_start|>hel"
    choice = complete(served, echo=True, logprobs=1, max_tokens=1)
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "abh"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"h": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_ask_nothing_of_the_engine(served: Served, stream: bool) -> None:
    for echo, text in ((False, ""), (True, "ab")):
        body = {"prompt": "ab", "max_tokens": 0, "echo": echo, "stream": stream}
        response = served.client.post("/v1/completions", json=body)
        (answer,) = read_events(response) if stream else [response.json()]
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "length"
    assert served.engine.requests == []


def test_no_tokens_with_scores_is_a_scoring_request(served: Served) -> None:
    choice = complete(served, echo=True, logprobs=1, max_tokens=0)
    (request,) = served.engine.requests
    assert (request.max_tokens, request.prompt_logprobs) == (0, 1)
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]


def test_streamed_scores_are_those_of_the_whole(served: Served) -> None:
    served.engine.script = lambda _: text_script("日x")
    fields = {"prompt": "ab", "max_tokens": 9, "logprobs": 1, "echo": True}
    events = read_events(served.client.post("/v1/completions", json={**fields, "stream": True}))
    whole = served.client.post("/v1/completions", json=fields).json()["choices"][0]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for e in events for item in e["choices"][0]["logprobs"][name]] == whole["logprobs"][name]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"] == "ab日x"
    assert whole["logprobs"]["tokens"][2] == "bytes:\\xe6"


def test_chat_logprobs(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 2}
    content = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "e"]
    assert content[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
        ],
    }
    body["top_logprobs"] = 0
    content = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_bytes_of_half_a_character_stay_distinct() -> None:
    scored = ScoredToken(0xE6, -1.0, ((0xE6, -1.0), (0xE8, -2.0)))
    assert completion_logprobs(TOKENIZER, [scored], [0], 2)["top_logprobs"] == [
        {"bytes:\\xe6": -1.0, "bytes:\\xe8": -2.0},
    ]
    shown = json.loads(json.dumps(chat_logprobs(TOKENIZER, [scored])))
    assert shown["content"][0]["bytes"] == [0xE6]


def test_the_drawn_token_is_among_its_alternatives() -> None:
    scored = ScoredToken(97, -3.0, ((98, -1.0),))
    assert completion_logprobs(TOKENIZER, [scored], [0], 1)["top_logprobs"] == [{"b": -1.0, "a": -3.0}]


def test_minus_infinity_becomes_a_number() -> None:
    shown = completion_logprobs(TOKENIZER, [ScoredToken(97, float("-inf"))], [0], 0)
    assert json.loads(json.dumps(shown, allow_nan=False))["token_logprobs"] == [LOGPROB_MIN]


@given(st.text())
def test_offsets_point_at_the_character_of_each_byte(text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    expected = [index for index, character in enumerate(text) for _ in character.encode("utf-8", "surrogatepass")]
    if raw == text.encode("utf-8", "replace"):
        assert text_offsets(TOKENIZER, list(raw)) == expected


@given(st.binary(max_size=8))
def test_a_token_string_is_text_or_its_bytes(raw: bytes) -> None:
    shown = token_string(raw)
    assert shown.encode() == raw or shown == "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
