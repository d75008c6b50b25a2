"""`flare chat` with lines from a script and a scripted server."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from rich.console import Console

from flare.chat_client import Chat, ChatError, ChatServer, Conversation
from flare.cli import main

from .sse_server import Script, scripted_server


class InterruptedChat(Chat):
    """A chat in which ^C is pressed once `w2` is shown."""

    def _write(self, piece: str) -> None:
        super()._write(piece)
        if "w2" in piece:
            raise KeyboardInterrupt


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A reader of these lines, then of the end of input."""
    waiting = iter(lines)

    def read_line() -> str:
        line = next(waiting, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read_line


@contextmanager
def talking(script: Script, system: str | None = None, kind: type[Chat] = Chat) -> Iterator[tuple[Chat, Console]]:
    console = Console(file=io.StringIO(), width=200)
    with scripted_server(script) as url, httpx.Client(base_url=url) as client:
        server = ChatServer(client, None, {"max_tokens": 3, "temperature": 0.5})
        yield kind(server, console, Conversation(system)), console


def shown(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_conversation_is_sent_whole_and_answers_are_shown_as_they_come() -> None:
    script = Script()
    with talking(script) as (chat, console):
        chat.run(typed("hello", "", "and now?", "/exit", "not read"))
    assert shown(console) == "w0\u2028 w1\u2028 w2\u2028 \n" * 2
    first, second = script.requests
    assert first["messages"] == [{"role": "user", "content": "hello"}]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "w0\u2028 w1\u2028 w2\u2028 "
    assert (first["model"], first["stream"], first["max_tokens"], first["temperature"]) == ("scripted", True, 3, 0.5)


def test_commands_change_the_conversation() -> None:
    script = Script()
    with talking(script, system="Be brief.") as (chat, console):
        chat.run(typed("one", "/reset", "two", "/system Be long.", "three", "/system", "four", "/what"))
    sent = [[message["content"] for message in request["messages"]] for request in script.requests]
    assert sent == [["Be brief.", "one"], ["Be brief.", "two"], ["Be long.", "three"], ["four"]]
    assert "/reset forgets" in shown(console)


def test_an_interrupt_cancels_the_answer_and_keeps_what_came() -> None:
    script = Script(endless=True)
    with talking(script, kind=InterruptedChat) as (chat, console):
        chat.run(typed("hello"))
        script.left.acquire()  # until the server has seen the client leave
        script.endless = False
        chat.run(typed("again"))
    assert "(cancelled)" in shown(console)
    assert script.requests[1]["messages"][1] == {"role": "assistant", "content": "w0\u2028 w1\u2028 w2\u2028 "}


def test_an_interrupt_at_the_prompt_leaves() -> None:
    with talking(Script()) as (chat, _):
        chat.run(typed(KeyboardInterrupt, "not read"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(broken_status=503), "HTTP 503: out of order"),
        (Script(cut=True), "the connection failed"),
        (Script(error_event=True), "the frame failed"),
    ],
)
def test_errors_are_shown_and_the_conversation_goes_on(script: Script, message: str) -> None:
    with talking(script) as (chat, console):
        chat.run(typed("hello"))
        script.broken_status = None
        script.cut = script.error_event = False
        chat.run(typed("again"))
    assert message in shown(console)
    assert shown(console).endswith("w0\u2028 w1\u2028 w2\u2028 \n\n")
    assert script.requests[-1]["messages"][-1]["content"] == "again"


def test_a_failed_question_is_forgotten() -> None:
    script = Script(broken_status=500)
    with talking(script) as (chat, _):
        chat.run(typed("hello"))
        script.broken_status = None
        chat.run(typed("again"))
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["again"]


def test_a_model_cannot_steer_the_terminal() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        chunk = {"choices": [{"delta": {"content": "\x1b[2J\x9b1mred[bold]\tend\x07\r\n"}}]}
        return httpx.Response(200, content=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    console = Console(file=io.StringIO(), width=200)
    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
        Chat(ChatServer(client, "m", {}), console, Conversation()).run(typed("hello"))
    assert shown(console).startswith("[2J1mred[bold]")
    assert not set("\x1b\x9b\x07\r") & set(shown(console))


@pytest.mark.parametrize(
    ("status", "body"), [(200, b'{"data":[]}'), (200, b"<html>"), (401, b'{"error":{"message":"no"}}')]
)
def test_a_server_without_a_model_is_an_error(status: int, body: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    with httpx.Client(base_url="http://test", transport=transport) as client, pytest.raises(ChatError):
        ChatServer(client, None, {})


def test_the_command_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(api_key="k3y")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    with scripted_server(script) as url, pytest.raises(SystemExit) as ended:
        main(
            [
                "chat",
                "--url",
                f"{url}/v1",
                "--api-key",
                "k3y",
                "--system",
                "Be brief.",
                "--max-tokens",
                "2",
                "--seed",
                "5",
            ]
        )
    assert ended.value.code == 0
    assert "w0\u2028 w1" in capsys.readouterr().out
    (request,) = script.requests
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert (request["seed"], request["max_tokens"]) == (5, 2)
    assert "temperature" not in request


def test_a_script_notices_that_an_answer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\n"))
    with scripted_server(Script(broken_status=503)) as url, pytest.raises(SystemExit) as ended:
        main(["chat", "--url", url, "--max-tokens", "3"])
    assert ended.value.code == 1


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://["])
def test_what_is_no_address_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--url", url])
    assert ended.value.code == 1
    assert "error:" in capsys.readouterr().err


def test_no_server_is_told_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted_server(Script()) as url:
        pass
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--url", url])
    assert ended.value.code == 1
    assert "flare run" in capsys.readouterr().err
