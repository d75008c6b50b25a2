"""Prompts of completions and conversations as tokens.

Owns the forms that a prompt may take, and refusing what cannot fit before it costs anything. Does not own tokenizing.
Surprising rule: text that is too long for the context even if every token were the longest one is refused unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flare.request import Endpoints
from flare.tokens.template import TemplateError

from .context import ServerContext
from .errors import ApiError, invalid
from .validate import CONTEXT_EXCEEDED, check_token_ids, context_exceeded
from .wire import ChatMessage, ContentPart


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its tokens, the text it was given as (None: it was given as tokens), and its endpoints."""

    tokens: tuple[int, ...]
    text: str | None
    endpoints: Endpoints


def split_prompts(prompt: str | list[str | int | list[int]] | None) -> list[str | list[int]]:
    """The prompts of one request. Raises `ApiError` 400 for a missing, empty or mixed one."""
    if isinstance(prompt, str):
        found: list[str | list[int]] = [prompt]
    elif not prompt:
        raise invalid("prompt", "`prompt` is required: text, a list of texts, token ids, or a list of those.")
    elif ids := [item for item in prompt if isinstance(item, int)]:
        found = [ids]
        if len(ids) != len(prompt):
            raise invalid("prompt", "`prompt` mixes token ids with something else.")
    else:
        found = [item for item in prompt if not isinstance(item, int)]
        if len({type(item) for item in found}) != 1:
            raise invalid("prompt", "`prompt` mixes texts and token ids.")
    if not all(found):
        raise invalid("prompt", "`prompt` must not be empty: it needs at least one token.")
    return found


def encode_prompt(item: str | list[int], context: ServerContext) -> Prompt:
    """One prompt as tokens. Special tokens written in its text become control tokens. Raises `ApiError` 400."""
    if isinstance(item, list):
        if len(item) > context.max_model_len:
            raise context_exceeded("prompt", len(item), context.max_model_len)
        check_token_ids("prompt", item, context.vocab_size)
        return Prompt(tuple(item), None, Endpoints())
    check_length("prompt", len(item), context)
    tokens = context.tokenizer.encode(item, parse_special=True, add_bos=None)
    if not tokens:
        raise invalid("prompt", "`prompt` must not be empty: it needs at least one token.")
    return Prompt(tuple(tokens), item, Endpoints())


def check_length(param: str, characters: int, context: ServerContext) -> None:
    """Raises `ApiError` 400 for text that cannot fit the context whatever its tokens are."""
    if characters > context.max_model_len * context.token_bytes_max:
        message = f"`{param}` has {characters} characters; the context holds {context.max_model_len} tokens."
        raise invalid(param, message, code=CONTEXT_EXCEEDED)


def plain_messages(messages: Sequence[ChatMessage] | None, context: ServerContext) -> list[dict[str, str]]:
    """Messages with their content as one text. Raises `ApiError` 400 naming the message at fault."""
    if not messages:
        raise invalid("messages", "`messages` must hold at least one message.")
    if len(messages) > context.limits.messages:
        raise invalid("messages", f"`messages` may hold at most {context.limits.messages}, not {len(messages)}.")
    plain = [
        {"role": message.role, "content": _content(message, f"messages[{index}].content")}
        for index, message in enumerate(messages)
    ]
    check_length("messages", sum(len(message["content"]) + len(message["role"]) for message in plain), context)
    return plain


def encode_chat(messages: Sequence[dict[str, str]], add_generation_prompt: bool, context: ServerContext) -> Prompt:
    """A conversation as tokens. Raises `ApiError` 400 with the template's own words, or where there is no template."""
    if context.chat is None:
        raise invalid("messages", "This model has no chat template: use /v1/completions.", code="no_chat_template")
    try:
        rendered = context.chat.render(messages, add_generation_prompt)
    except TemplateError as error:
        raise invalid("messages", f"The chat template refuses these messages: {error}") from error
    return Prompt(tuple(rendered.tokens), None, rendered.endpoints)


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if not content:
        # An assistant's turn that called tools has no text; nobody else may be silent.
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise _bad_content(where, "is missing")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise _bad_content(where, f"has the type {part.type[:32]!r}; this model reads only text parts")
    if part.text is None:
        raise _bad_content(where, "has no text")
    return part.text


def _bad_content(where: str, fault: str) -> ApiError:
    return invalid("messages", f"`{where}` {fault}.")
