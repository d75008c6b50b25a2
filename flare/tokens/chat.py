"""Chat messages to prompt tokens, with the exact endpoints that the scheduler needs.

Owns keeping control tokens out of what users wrote. Does not own jinja (`template`), where messages end (`layout`) or
wire formats. Surprising rule: a control token spelled out in a message is hidden from the tokenizer by one marker
character that occurs nowhere else; the template may trim or move the text around it as it likes. Text is split only
there, so that everything else is tokenized as `transformers` would.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from flare.request import Endpoints

from .layout import PromptLayout
from .template import Message, Template
from .tokenizer import Encoded, Tokenizer, replace_surrogates

MARKERS = (range(0xFDD0, 0xFDF0), range(0xF0000, 0x10FFFE))
"""Noncharacters, then private use: one that the messages do not contain becomes the marker."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`tokens` begin with bos only where the template writes it."""

    tokens: tuple[int, ...]
    endpoints: Endpoints


class ChatTemplate:
    """The chat side of one model. Safe to use from several threads."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._layout = PromptLayout(template, tokenizer)
        texts = list(tokenizer.special_texts)
        self._heads = {text[:end] for text in texts for end in range(1, len(text))}
        self._tails = {text[begin:] for text in texts for begin in range(1, len(text))}
        self._part_chars_max = max(map(len, self._heads), default=0)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> ChatPrompt:
        """`messages` are mappings with `role` and `content` (a str, or None where a template takes it).

        Raises `TemplateError` when the template refuses.
        """
        marker = _unused_character(messages)
        hidden = [self._hide_message(message, marker) for message in messages]
        text = self._template.render(hidden, add_generation_prompt)
        ids, ends = self._encode(text, marker)
        markers = [match.start() for match in re.finditer(marker, text)]
        bounds = self._layout.find(hidden, text, add_generation_prompt, marker)

        def tokens_to(position: int) -> int:
            return bisect_right(ends, position - bisect_left(markers, position))

        endpoints = {tokens_to(position) for position in bounds.messages} - {0}
        return ChatPrompt(tuple(ids), Endpoints(tokens_to(bounds.system), tuple(sorted(endpoints))))

    def _encode(self, text: str, marker: str) -> Encoded:
        """Token ids of rendered text without its markers, with ends in that text. A run between control tokens of the
        template that has a marker is read literally; all that lies between two such runs goes in one piece."""
        runs: list[tuple[str, bool]] = []
        plain = ""
        begin = 0
        for match in chain(self._tokenizer.special_pattern.finditer(text), (None,)):
            run, control = (text[begin:], "") if match is None else (text[begin : match.start()], match[0])
            begin = len(text) if match is None else match.end()
            if marker in run:
                runs += [(plain, True), (run.replace(marker, ""), False)]
                plain = control
            else:
                plain += run + control
        runs.append((plain, True))
        ids: list[int] = []
        ends: list[int] = []
        offset = 0
        for run, parse_special in runs:
            encoded = self._tokenizer.encode_with_ends(run, parse_special)
            ids += encoded.ids
            ends += [offset + end for end in encoded.ends]
            offset += len(run)
        return Encoded(ids, ends)

    def _hide_message(self, message: Message, marker: str) -> Message:
        hidden = {key: self._hide(value, marker) for key, value in message.items()}
        content = hidden.get("content")
        if isinstance(content, str):
            hidden["content"] = self._guard(content, marker)
        return hidden

    def _hide(self, value: object, marker: str) -> object:
        """`value` with a marker after the first character of every control token spelled out in its strings."""
        if isinstance(value, str):
            spelled = self._tokenizer.special_pattern
            return spelled.sub(lambda match: match[0][0] + marker + match[0][1:], replace_surrogates(value))
        if isinstance(value, Mapping):
            return {key: self._hide(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item, marker) for item in value]
        return value

    def _guard(self, content: str, marker: str) -> str:
        """Mark an end of `content` that could complete a control token with what the template puts beside it."""
        inner = content.strip()
        begin = len(content) - len(content.lstrip())
        end = begin + len(inner)
        lengths = range(1, min(self._part_chars_max, len(inner)) + 1)
        before = marker if any(inner[:length] in self._tails for length in lengths) else ""
        after = marker if any(inner[-length:] in self._heads for length in lengths) else ""
        return content[:begin] + before + inner + after + content[end:] if before or after else content


def _unused_character(messages: Sequence[Message]) -> str:
    used = set(chain.from_iterable(text for text in _strings(list(messages)) if not text.isascii()))
    return next(chr(code) for code in chain(*MARKERS) if chr(code) not in used)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
