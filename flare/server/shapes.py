"""How answers look: the completion's and the chat's choices, whole and in pieces.

Owns the JSON of a choice. Does not own the envelope around it (`envelope`). Surprising rule: both shapes render a
delta; an answer in one piece is a single delta that holds everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flare.request import Delta, ScoredToken

from .context import TextTokenizer
from .logprobs import chat_logprobs, completion_logprobs, text_offsets
from .prompts import Prompt


class Shape(Protocol):
    """One of OpenAI's two forms of answer."""

    @property
    def object_name(self) -> str:
        """`object` of the whole answer."""
        ...

    @property
    def chunk_name(self) -> str:
        """`object` of a piece of a stream."""
        ...

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are shown: then a piece without text may still matter."""
        ...

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """The JSON before and after the text of a plain piece: not the first, not the last, no scores."""
        ...

    def chunk(self, index: int, delta: Delta, first: bool) -> dict[str, object]:
        """A choice in a stream."""
        ...

    def choice(self, index: int, delta: Delta) -> dict[str, object]:
        """A choice of a whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """`text_completion`. `prompts` holds the prompt of each choice. `logprobs` None: none are shown."""

    tokenizer: TextTokenizer
    prompts: Sequence[Prompt]
    echo: bool
    logprobs: int | None
    object_name: str = "text_completion"
    chunk_name: str = "text_completion"

    @property
    def scored(self) -> bool:
        return self.logprobs is not None

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'

    def chunk(self, index: int, delta: Delta, first: bool) -> dict[str, object]:
        echoed = first and self.echo
        text = self._prompt_text(index) + delta.text if echoed else delta.text
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, delta, echoed),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def choice(self, index: int, delta: Delta) -> dict[str, object]:
        return self.chunk(index, delta, first=True)

    def _prompt_text(self, index: int) -> str:
        prompt = self.prompts[index]
        return self.tokenizer.decode(prompt.tokens, skip_special=False) if prompt.text is None else prompt.text

    def _logprobs(self, index: int, delta: Delta, echoed: bool) -> dict[str, object] | None:
        if self.logprobs is None:
            return None
        start = len(self._prompt_text(index))
        tokens: tuple[ScoredToken, ...] = delta.tokens
        offsets = [start + offset for offset in delta.offsets]
        if echoed and delta.prompt_scores is not None:
            tokens = delta.prompt_scores + tokens
            offsets = text_offsets(self.tokenizer, self.prompts[index].tokens) + offsets
        return completion_logprobs(self.tokenizer, tokens, offsets, self.logprobs)


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion`."""

    tokenizer: TextTokenizer
    scored: bool
    object_name: str = "chat.completion"
    chunk_name: str = "chat.completion.chunk"

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}'

    def chunk(self, index: int, delta: Delta, first: bool) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant"} if first else {}
        if delta.text or first:
            message["content"] = delta.text
        return self._choice(index, "delta", message, delta)

    def choice(self, index: int, delta: Delta) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(index, "message", message, delta)

    def _choice(self, index: int, name: str, message: dict[str, object], delta: Delta) -> dict[str, object]:
        return {
            "index": index,
            name: message,
            "logprobs": chat_logprobs(self.tokenizer, delta.tokens) if self.scored else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
