"""Requests as they arrive: typed bodies, and how bytes become them.

Owns field names and JSON types. Does not own ranges and rules (`validate`) nor the list of foreign fields (`fields`).
Surprising rule: JSON's null means "not given" for every field, and types are strict: `"3"` and `3.0` are no integers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from .errors import ApiError, invalid
from .fields import FieldCheck


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides its choices."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """How the answer is constrained: by nothing."""

    type: str


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[msgspec.Raw] | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)

_CHECKS: Mapping[type[msgspec.Struct], FieldCheck] = {
    body: FieldCheck(body.__struct_fields__) for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
}
LENIENT_BYTES_MAX = 64 * 1024
"""Python's own parser is slow and holds the interpreter; it reads no more than this to improve a message."""

_PATH = re.compile(r"`\$\.?([^`\[]*)[^`]*`$")


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """The typed body. Raises `ApiError` 400 naming the field where JSON, a type or an unknown field is at fault."""
    try:
        _CHECKS[body_type].check(raw)
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        raise _type_error(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _syntax_error(raw, error) from None


def _type_error(error: msgspec.ValidationError) -> ApiError:
    """A field of the wrong type: msgspec's message ends with the field's path, whose first name is the parameter."""
    message = str(error)
    found = _PATH.search(message)
    if found is None:
        return invalid(None, f"The body must be a JSON object: {message}.")
    return invalid(found[1].split(".")[0] or None, f"{message}.")


def _syntax_error(raw: bytes, error: Exception) -> ApiError:
    """No JSON at all, or what Python's own writer emits besides: halves of surrogate pairs, NaN and Infinity. Those two
    numbers name their field."""
    try:
        lenient = json.loads(raw) if len(raw) <= LENIENT_BYTES_MAX else None
    except (ValueError, RecursionError):
        return invalid(None, f"The body is not valid JSON: {error}.", code="invalid_json")
    if _has_half_pair(lenient):
        half = "half of a UTF-16 surrogate pair, which is no character"
        return invalid(None, f"The body is not valid JSON: a text in it has {half}.", code="invalid_json")
    if isinstance(lenient, dict):
        for name, value in lenient.items():
            if _has_non_finite(value):
                return invalid(name, f"`{name}` must be a finite number.")
    return invalid(None, f"The body is not valid JSON: {error}.", code="invalid_json")


def _has_half_pair(value: object) -> bool:
    """Whether any text within is no Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _has_non_finite(value: object) -> bool:
    """Whether the value, or one directly inside it, is NaN or infinite."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(isinstance(number, float) and not math.isfinite(number) for number in inside)
