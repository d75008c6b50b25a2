"""What the composition gives to the HTTP layer.

Owns `ServerContext`, its limits, and the two small protocols through which text becomes tokens. Does not own their
implementations. Surprising rule: time and randomness are given too, so that tests see fixed ids and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flare.request import Endpoints

from .engine_api import EngineApi


@dataclass(frozen=True, slots=True)
class Limits:
    """What one HTTP request may ask for; each refusal names its field.

    `sequences` bounds prompts times `n`. `inline_bytes` is the size above which parsing, tokenizing and rendering go to
    a worker thread, in bytes of the body.
    """

    body_bytes: int = 4 * 2**20
    sequences: int = 128
    messages: int = 1024
    stop_strings: int = 16
    stop_characters: int = 1024
    stop_token_ids: int = 64
    logit_bias: int = 1024
    logprobs: int = 20
    user_characters: int = 512
    inline_bytes: int = 16 * 1024


class TextTokenizer(Protocol):
    """Text to tokens and back; safe to call from a worker thread."""

    def encode(self, text: str, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        """Token ids; `add_bos` None: as the model declares."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text; invalid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """The raw bytes that a token stands for."""
        ...


class RenderedChat(Protocol):
    """A rendered conversation."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def endpoints(self) -> Endpoints: ...


class ChatRenderer(Protocol):
    """Messages to tokens; safe to call from a worker thread."""

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> RenderedChat:
        """Messages hold `role` and `content`, in which nothing becomes a control token. Raises `TemplateError`."""
        ...


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything that the endpoints use. `chat` is None where the model has no chat template.

    `served_names`: the first is canonical. `random_bits` draws a number in [0, 2**63) for seeds and ids; `unix_s` is
    the wall clock in whole seconds. `token_bytes_max` is the length of the longest token, in bytes.
    """

    engine: EngineApi
    tokenizer: TextTokenizer
    chat: ChatRenderer | None
    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    token_bytes_max: int
    render_metrics: Callable[[], bytes]
    started_unix_s: int
    random_bits: Callable[[], int]
    unix_s: Callable[[], int]
    version: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    ping_interval_s: int = 15
    limits: Limits = field(default_factory=Limits)
