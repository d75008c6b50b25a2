"""Rendering of a model's chat template to text.

Owns the sandboxed jinja2 environment and the names that templates may use, as `transformers` gives them. Does not own
tokens (`chat`). Surprising rule: whatever a template does wrong is a `TemplateError`, for it is the messages that
made it do so; a template that cannot even be compiled is the model's fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flare.graphs.weights.errors import ModelError

Message = Mapping[str, object]


class TemplateError(ValueError):
    """The chat template refuses these messages; the message is the template's own where it gave one."""


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks an assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """A compiled chat template. `names` are the special tokens that it may use, such as `bos_token`."""

    def __init__(self, source: str, names: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """Raises `ModelError` if the template cannot be compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        self._names = dict(names)
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Raises `TemplateError`."""
        try:
            return self._compiled.render(
                self._names,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
