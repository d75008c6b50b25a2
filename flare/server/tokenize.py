"""POST /tokenize and POST /detokenize, in vLLM's shapes.

Owns those two bodies' meaning. Does not own tokenizing. Surprising rule: text is read as a raw completion's prompt is,
so that special tokens written in it are control tokens; messages are read as chat's are, where they never are.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from .body import read_body
from .context import ServerContext
from .envelope import json_line
from .errors import invalid
from .logprobs import token_string
from .prompts import check_length, encode_chat, plain_messages
from .threads import off_loop
from .validate import check_model, check_token_ids
from .wire import DetokenizeBody, TokenizeBody


async def tokenize(request: Request, context: ServerContext) -> Response:
    """The tokens of a text or a conversation, and how many there are."""
    body, size = await read_body(request, TokenizeBody, context.limits)
    check_model(body.model, context)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "Give either `prompt` or `messages`.")
    tokens = await off_loop(partial(_tokens, body, context), size, context.limits.inline_bytes)
    strings = None
    if body.return_token_strs:
        strings = [token_string(context.tokenizer.token_bytes(token)) for token in tokens]
    answer = {"count": len(tokens), "max_model_len": context.max_model_len, "tokens": tokens, "token_strs": strings}
    return Response(json_line(answer), media_type="application/json")


async def detokenize(request: Request, context: ServerContext) -> Response:
    """The text of tokens, special ones spelled out."""
    body, size = await read_body(request, DetokenizeBody, context.limits)
    check_model(body.model, context)
    if body.tokens is None:
        raise invalid("tokens", "`tokens` is required: a list of token ids.")
    check_token_ids("tokens", body.tokens, context.vocab_size)
    decode = partial(context.tokenizer.decode, body.tokens, skip_special=False)
    text = await off_loop(decode, size, context.limits.inline_bytes)
    return Response(json_line({"prompt": text}), media_type="application/json")


def _tokens(body: TokenizeBody, context: ServerContext) -> list[int]:
    if body.messages is not None:
        messages = plain_messages(body.messages, context)
        return list(encode_chat(messages, body.add_generation_prompt is not False, context).tokens)
    text = body.prompt or ""
    check_length("prompt", len(text), context)
    return context.tokenizer.encode(
        text, parse_special=True, add_bos=None if body.add_special_tokens is not False else False
    )
