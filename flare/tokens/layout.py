"""Where each message ends in a rendered prompt, and the system prompt.

Owns finding character positions. Does not own tokens (`chat`). Surprising rule: a template is a program, so its layout
is learned by rendering again with each content replaced by a sentinel; what lies between two sentinels is
divided once by rendering the shorter conversation, and remembered. A template that changes its layout with the
content is measured by rendering every shorter conversation instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .template import Message, Template, TemplateError
from .tokenizer import Tokenizer

K = TypeVar("K")

SYSTEM_ROLES = ("system", "developer")
SHORTER_RENDERS_MAX = 64
"""At most so many messages, the last ones, are measured by rendering shorter conversations: its cost is quadratic."""
REMEMBERED_MAX = 256


@dataclass(frozen=True, slots=True)
class Bounds:
    """Exclusive ends in the characters of the rendered text. `messages` do not fall. `system` 0: no system prompt, be
    it the client's or one that the template puts in by itself."""

    system: int
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A rendering with sentinels for contents: `gaps[k]` is the text before sentinel k, the last one ends the text."""

    messages: Sequence[Message]
    gaps: list[str]


class PromptLayout:
    """Finds bounds for one template. Remembers how texts between messages divide."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self._template = template
        self._special = tokenizer.special_pattern
        self._bos_text = "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        self._tails: dict[tuple[str, str, str], int] = {}
        self._inserted: dict[str, int] = {}

    def find(self, messages: Sequence[Message], text: str, add_generation_prompt: bool, marker: str) -> Bounds:
        """Bounds in `text`, the rendering of `messages`; `marker` occurs in no message but to hide control tokens."""
        skeleton = self._skeleton(messages, add_generation_prompt, marker)
        ends = None if skeleton is None else self._aligned(messages, text, skeleton)
        if ends is None:
            ends = self._by_shorter_conversations(messages, text)
        if messages and messages[0].get("role") in SYSTEM_ROLES:
            return Bounds(ends[0] if len(ends) == len(messages) else 0, tuple(ends))
        return Bounds(self._inserted_system(messages, text, skeleton, marker), tuple(ends))

    def _skeleton(self, messages: Sequence[Message], add_generation_prompt: bool, marker: str) -> _Skeleton | None:
        """None if the template does not write every content exactly once, in order."""
        if not all(isinstance(message.get("content"), str) for message in messages):
            return None
        sentinels = [f"{marker}{index}{marker}" for index in range(len(messages))]
        blank = [{**message, "content": mark} for message, mark in zip(messages, sentinels, strict=True)]
        try:
            text = self._template.render(blank, add_generation_prompt)
        except TemplateError:
            return None
        gaps, begin = [], 0
        for sentinel in sentinels:
            found = text.find(sentinel, begin)
            if found < 0:
                return None
            gaps.append(text[begin:found])
            begin = found + len(sentinel)
        gaps.append(text[begin:])
        return None if any(marker in gap for gap in gaps) else _Skeleton(blank, gaps)

    def _aligned(self, messages: Sequence[Message], text: str, skeleton: _Skeleton) -> list[int] | None:
        """Ends in `text`, if it is the skeleton with contents in place, as they are, trimmed, or otherwise changed
        between control tokens that only the template can write."""
        position = len(skeleton.gaps[0])
        if not text.startswith(skeleton.gaps[0]):
            return None
        ends = []
        for index, gap in enumerate(skeleton.gaps[1:]):
            content = str(messages[index]["content"])
            variants = (content, content.strip())
            written = next((variant for variant in variants if text.startswith(variant + gap, position)), None)
            if written is not None:
                position += len(written)
            elif self._special.search(gap) and (found := text.find(gap, position)) >= 0:
                position = found
            else:
                return None
            ends.append(position + self._tail(skeleton, index))
            position += len(gap)
        return ends if position == len(text) else None

    def _tail(self, skeleton: _Skeleton, index: int) -> int:
        """How much of the gap after message `index` belongs to it."""
        gap = skeleton.gaps[index + 1]
        roles = [str(message.get("role")) for message in skeleton.messages[index : index + 2]]
        key = (roles[0], "".join(roles[1:]), gap)
        tail = self._tails.get(key)
        if tail is None:
            tail = self._measure_tail(skeleton, index)
            _remember(self._tails, key, tail)
        return tail

    def _measure_tail(self, skeleton: _Skeleton, index: int) -> int:
        try:
            shorter = self._template.render(skeleton.messages[: index + 1], False)
        except TemplateError:
            return 0
        _, _, ending = shorter.partition(str(skeleton.messages[index]["content"]))
        return _common_chars(ending, skeleton.gaps[index + 1])

    def _by_shorter_conversations(self, messages: Sequence[Message], text: str) -> list[int]:
        ends: list[int] = []
        for index in range(max(0, len(messages) - SHORTER_RENDERS_MAX), len(messages)):
            try:
                shorter = self._template.render(messages[: index + 1], False)
            except TemplateError:
                continue
            ends.append(max(_common_chars(shorter, text), *ends[-1:], 0))
        return ends

    def _inserted_system(self, messages: Sequence[Message], text: str, skeleton: _Skeleton | None, marker: str) -> int:
        """Length of the system prompt that the template writes unasked: what stands before the opening of the first
        message, whose opening is known from a conversation that has a system message."""
        if skeleton is None and messages:
            skeleton = self._skeleton([{**messages[0], "content": ""}], False, marker)
        if skeleton is None or not messages or not text.startswith(skeleton.gaps[0]):
            return 0
        before = skeleton.gaps[0]
        length = self._inserted.get(before)
        if length is None:
            asked: list[Message] = [{"role": "system", "content": ""}, {**messages[0], "content": ""}]
            both = self._skeleton(asked, False, marker)
            opening = "" if both is None else both.gaps[1][self._tail(both, 0) :]
            inserted = before[: -len(opening)] if opening and before.endswith(opening) else ""
            length = len(inserted) if inserted.replace(self._bos_text, "").strip() else 0
            _remember(self._inserted, before, length)
        return length


def _remember(memory: dict[K, int], key: K, value: int) -> None:
    if len(memory) >= REMEMBERED_MAX:  # roles are the client's: do not grow with them
        memory.clear()
    memory[key] = value


def _common_chars(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return len(one) if other.startswith(one) else next((i for i, (a, b) in pairs if a != b), len(other))
