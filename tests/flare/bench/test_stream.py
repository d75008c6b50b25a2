"""One request, read from bytes with given times of arrival, and sent to a scripted server."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.bench.http import HttpError, Server, fetch
from flare.bench.stream import Ask, EventReader, Record, generate
from tests.flare.sse_server import Script, scripted_server

ASK = Ask("scripted", 5)
STREAM = (
    b": comment\r\n\r\n"
    b'data: {"choices":[{"text":"a","finish_reason":null}],"usage":null}\r\n\r\n'
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n'
    b'data:{"choices":[{"delta":{"content":"\xe2\x80\xa8"}}],"id":"x","new":{"deep":[1]}}\n\n'
    b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    record = Record(sent_ns=0)
    reader = EventReader(record)
    ends = sorted({*cuts, len(STREAM)})
    begin = 0
    for end in ends:
        reader.feed(end, STREAM[begin:end])
        begin = end
    assert reader.ended
    assert (record.prompt_tokens, record.output_tokens, record.counted) == (7, 3, True)
    assert (record.finish_reason, record.error) == ("stop", None)
    text_ends = [STREAM.index(b"\n", STREAM.index(mark)) + 1 for mark in (b'"a"', b"\xe2\x80\xa8")]
    assert record.delivered_ns == [min(end for end in ends if end >= needed) for needed in text_ends]


def test_an_error_event_and_nonsense_are_errors_of_the_request() -> None:
    record = Record(sent_ns=0)
    EventReader(record).feed(1, b'data: {"error":{"message":"the frame failed"}}\n\n')
    assert "the frame failed" in str(record.error)
    record = Record(sent_ns=0)
    EventReader(record).feed(1, b"data: [1, 2\n\n")
    assert "not understood" in str(record.error)


@pytest.mark.asyncio
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_request_is_sent_and_counted(endpoint: str) -> None:
    script = Script(api_key="k3y")
    ask = Ask("scripted", 5, endpoint="chat" if endpoint == "chat" else "completions")
    with scripted_server(script) as url:
        record = await generate(Server(url, "k3y"), ask, "one two.")
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, len(record.delivered_ns)) == (3, 5, 5)
    assert record.sent_ns < record.delivered_ns[0] <= record.delivered_ns[-1] <= record.ended_ns
    (request,) = script.requests
    assert request["path"] == ask.path
    assert request["ignore_eos"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert (request.get("prompt") or request["messages"][0]["content"]) == "one two."


def test_a_server_that_knows_no_ignore_eos_is_not_asked_for_it() -> None:
    assert "ignore_eos" not in json.loads(Ask("m", 5, ignore_eos=False).body("x"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(broken_status=500), "HTTP 500"),
        (Script(api_key="other"), "HTTP 401"),
        (Script(cut=True), "before the answer's end"),
        (Script(error_event=True), "the frame failed"),
    ],
)
async def test_what_goes_wrong_is_told(script: Script, error: str) -> None:
    with scripted_server(script) as url:
        record = await generate(Server(url, "k3y"), ASK, "one two.")
    assert error in str(record.error)


@pytest.mark.asyncio
async def test_without_usage_tokens_are_counted_by_chunks() -> None:
    with scripted_server(Script(usage=False)) as url:
        record = await generate(Server(url), ASK, "one two.")
    assert (record.output_tokens, record.counted, record.prompt_tokens, record.error) == (5, False, None, None)


@pytest.mark.asyncio
async def test_a_server_that_is_not_there_or_too_slow_is_an_error() -> None:
    with scripted_server(Script(endless=True)) as url:
        slow = await generate(Server(url, timeout_s=0.2), ASK, "one two.")
    assert "within 0.2 s" in str(slow.error)
    with pytest.raises(HttpError, match="cannot reach"):
        await fetch(Server(url), "GET", "/v1/models")
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Server("localhost:8000")
