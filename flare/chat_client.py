"""`flare chat`: a terminal client for a running server.

Owns the conversation, its commands and how answers are shown. Does not own anything of the server: it speaks the
public API alone. Surprising rule: ^C while an answer comes cancels that answer (the server notices, and frees its slot)
and keeps what has come of it; ^C at the prompt leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console

from .client import base_url, first_model
from .event_stream import DONE, EventSplitter
from .failure import show_error

_HELP = "/reset forgets the conversation, /system TEXT sets the system prompt (and resets), /exit leaves."
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Control characters but tab and line feed: a model's text must not steer the terminal."""


class ChatError(Exception):
    """The server cannot be reached or refused; the message says why."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Error(msgspec.Struct):
    message: str = "the server reports an error without a message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


@dataclass(slots=True)
class Conversation:
    """The messages so far, the system prompt first where there is one."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages.clear()

    def request(self) -> list[dict[str, str]]:
        """What is sent."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]


class ChatServer:
    """A server's chat endpoint. `options` go into every request (temperature and so on)."""

    def __init__(self, client: httpx.Client, model: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options
        self.model = model or self._first_model()

    def answer(self, messages: list[dict[str, str]]) -> Generator[str]:
        """The pieces of an answer as they come. Raises `ChatError`; closing the iterator cancels the answer."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        events = EventSplitter()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_error_message(response.status_code, response.read()))
                for piece in response.iter_bytes():
                    for data in events.feed(piece):
                        if data == DONE:
                            return
                        yield from _text(data)
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error
        raise ChatError("the server ended the answer early")

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
            if response.status_code != 200:
                raise ChatError(_error_message(response.status_code, response.content))
            return first_model(response.content)
        except httpx.HTTPError as error:
            raise ChatError(f"cannot reach {self._client.base_url}: {error}; start it with `flare run`") from error
        except ValueError as error:
            raise ChatError(str(error)) from error


class Chat:
    """Reads lines, answers them, until told to leave. `failed`: some answer did not come whole."""

    def __init__(self, server: ChatServer, console: Console, conversation: Conversation) -> None:
        self._server = server
        self._console = console
        self._conversation = conversation
        self.failed = False

    def run(self, read_line: Callable[[], str]) -> None:
        """`read_line` raises EOFError at the end of input, KeyboardInterrupt at ^C."""
        while True:
            try:
                line = read_line().strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line:
                self._say(line)

    def _command(self, line: str) -> bool:
        """Do what `line` says; False to leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._conversation.reset()
                self._note("The conversation is forgotten.")
            case "/system":
                self._conversation.system = rest.strip() or None
                self._conversation.reset()
                self._note("The system prompt is set." if rest.strip() else "There is no system prompt now.")
            case _:
                self._note(_HELP)
        return True

    def _say(self, line: str) -> None:
        messages = self._conversation.messages
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        note = error = ""
        try:
            with closing(self._server.answer(self._conversation.request())) as answer:
                for piece in answer:
                    pieces.append(piece)
                    self._write(piece)
        except KeyboardInterrupt:
            note = "(cancelled)"
        except ChatError as failure:
            error = str(failure)
            self.failed = True
        self._console.print()
        if pieces:
            messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            messages.pop()
        if note:
            self._note(note)
        if error:
            self._console.print(f"error: {error}", style="red", markup=False, highlight=False)

    def _write(self, piece: str) -> None:
        self._console.print(piece.translate(_CONTROL), end="", markup=False, highlight=False, soft_wrap=True)

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def chat(
    url: Annotated[str, typer.Option(help="The server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="[default: the first that the server lists]")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="[default: the server's]")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="[default: all that fits]")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Talk to a running server."""
    console = Console()
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    options = {name: value for name, value in given.items() if value is not None}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    server_url = base_url(url)
    interactive = sys.stdin.isatty()
    try:
        with httpx.Client(base_url=server_url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
            server = ChatServer(client, model, options)
            if interactive:
                console.print(f"{server.model} at {server_url}. {_HELP}", style="dim", markup=False, highlight=False)
            talk = Chat(server, console, Conversation(system))
            talk.run(lambda: input("> " if interactive else ""))
    except (ChatError, httpx.InvalidURL) as error:
        show_error(error)
        raise typer.Exit(1) from error
    if talk.failed and not interactive:  # a script must notice; a person has seen it
        raise typer.Exit(1)


def _text(data: bytes) -> Iterator[str]:
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        raise ChatError(f"a chunk is not understood: {error}") from error
    if chunk.error is not None:
        raise ChatError(chunk.error.message)
    for choice in chunk.choices:
        if choice.delta is not None and choice.delta.content:
            yield choice.delta.content


def _error_message(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"
