"""Answers in pieces: framing, roles, usage, several choices, failures (docs/api.md, "Streams")."""

from __future__ import annotations

import json

import httpx
import pytest
from structlog.testing import capture_logs

from flare.request import GenerationRequest
from flare.server.engine_api import RequestFailed, ServerStopping

from .events import Json, error_of, read_events, split_events, texts
from .scripted_engine import Script, text_script
from .serving import Served

PATHS = ("/v1/completions", "/v1/chat/completions")
AWKWARD = 'a\n\r\t"\\ \u2028\u2029\x85\x0b\x0c\x1c 日本語 🙂'


def body_for(path: str, **fields: object) -> Json:
    prompt: Json = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {**prompt, "max_tokens": 100, **fields}


def stream(served: Served, path: str, **fields: object) -> httpx.Response:
    return served.client.post(path, json=body_for(path, stream=True, **fields))


@pytest.mark.parametrize("path", PATHS)
def test_awkward_text_arrives_whole_and_on_one_line(served: Served, path: str) -> None:
    served.engine.script = lambda _: text_script(AWKWARD)
    response = stream(served, path)
    assert texts(read_events(response)) == [AWKWARD]
    lines = [line for line in httpx.Response(200, content=response.content).iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    whole = served.client.post(path, json=body_for(path)).json()["choices"][0]
    assert (whole["text"] if "text" in whole else whole["message"]["content"]) == AWKWARD


@pytest.mark.parametrize("path", PATHS)
def test_every_piece_is_complete(served: Served, path: str) -> None:
    events = read_events(stream(served, path))
    assert texts(events) == ["hello"]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert all("finish_reason" in choice and "logprobs" in choice for choice in choices)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


def test_a_piece_a_token_and_none_for_half_a_character(served: Served) -> None:
    served.engine.script = lambda _: text_script("ab日")
    pieces = [event["choices"][0]["text"] for event in read_events(stream(served, "/v1/completions"))]
    assert pieces == ["a", "b", "日", ""]


def test_length_ends_with_the_last_text(served: Served) -> None:
    events = read_events(stream(served, "/v1/completions", max_tokens=3))
    assert [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events] == [
        ("h", None),
        ("e", None),
        ("l", "length"),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_usage_comes_once_and_last(served: Served, path: str) -> None:
    events = read_events(stream(served, path, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    prompt = served.client.post(path, json=body_for(path)).json()["usage"]["prompt_tokens"]
    assert events[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}


@pytest.mark.parametrize("path", PATHS)
def test_several_choices_keep_apart(served: Served, path: str) -> None:
    def script(request: GenerationRequest) -> Script:
        return text_script("choice " + request.name[-1] * 3)

    served.engine.script = script
    events = read_events(stream(served, path, n=3, stream_options={"include_usage": True}))
    assert texts(events, 3) == ["choice 000", "choice 111", "choice 222"]
    choices = [choice for event in events for choice in event["choices"]]
    finished = sorted(choice["index"] for choice in choices if choice["finish_reason"])
    assert finished == [0, 1, 2]
    assert events[-1]["usage"]["completion_tokens"] == 33
    assert events[-1]["usage"]["prompt_tokens"] == len(served.engine.requests[0].prompt)
    if "chat" in path:
        roles = [choice["index"] for choice in choices if "role" in choice["delta"]]
        assert sorted(roles) == [0, 1, 2]
        firsts = [next(choice for choice in choices if choice["index"] == index) for index in range(3)]
        assert all(choice["delta"]["role"] == "assistant" for choice in firsts)


def test_choices_arrive_as_they_come(served: Served) -> None:
    """The first choice waits; the second is read to its end meanwhile."""
    served.engine.script = lambda request: text_script("ab", hold_after=0 if request.name.endswith("-0") else None)
    body = body_for("/v1/completions", stream=True, n=2)
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        early = [json.loads(next(lines).removeprefix("data: "))["choices"][0] for _ in range(3)]
        served.release()
        late = [line.removeprefix("data: ") for line in lines]
    assert [choice["index"] for choice in early] == [1, 1, 1]
    assert early[-1]["finish_reason"] == "stop"
    assert late[-1] == "[DONE]"
    assert all(json.loads(line)["choices"][0]["index"] == 0 for line in late[:-1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("failure", "code", "status"),
    [
        (RequestFailed("a frame failed"), "request_failed", 500),
        (ServerStopping("the server stops"), "server_stopping", 503),
        (ZeroDivisionError("secret detail"), "internal_error", 500),
    ],
)
def test_failures_are_told(served: Served, path: str, n: int, failure: Exception, code: str, status: int) -> None:
    served.engine.script = lambda request: text_script("ab", failure=failure if request.name.endswith("-0") else None)
    with capture_logs() as lines:
        payloads = split_events(stream(served, path, n=n).content)
    assert [line["event"] for line in lines] == ["server.stream_failed"]
    assert json.loads(payloads[-1])["error"]["code"] == code
    assert b"[DONE]" not in payloads
    assert b"secret" not in payloads[-1]
    with capture_logs() as lines:
        error = error_of(served.client.post(path, json=body_for(path, n=n)), status)
    assert len(lines) == (code == "internal_error")
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert served.running() == 0
    served.engine.script = lambda _: text_script("fine")
    assert texts(read_events(stream(served, path))) == ["fine"]


def test_prompts_times_choices_are_numbered(served: Served) -> None:
    served.engine.script = lambda request: text_script(bytes(request.prompt).decode())
    answer = served.client.post("/v1/completions", json={"prompt": ["ab", "cd"], "n": 2}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "cd", "cd"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}
    answer = served.client.post("/v1/completions", json={"prompt": [[97, 98], [99]]}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "c"]


def test_content_parts_are_joined(served: Served) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for content in ("hi", parts):
        body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
        assert served.client.post("/v1/chat/completions", json=body).status_code == 200
    plain, joined = served.engine.requests
    assert plain.prompt == joined.prompt
    assert plain.endpoints == joined.endpoints
    assert 0 < plain.endpoints.system_end < plain.endpoints.messages[-1] < len(plain.prompt)


def test_an_assistant_that_called_tools_may_be_silent(served: Served) -> None:
    silent = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    body = {"messages": [{"role": "user", "content": "hi"}, silent]}
    assert served.client.post("/v1/chat/completions", json=body).status_code == 200
