"""POST /v1/chat/completions.

Owns what is particular to chat: messages, and the two names of its output limit. Surprising rule: without a limit an
answer may fill all that is left of the context.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from .answers import Sequences, answer, new_envelope
from .auth import name_user
from .body import read_body
from .context import ServerContext
from .errors import invalid
from .prompts import encode_chat, plain_messages
from .shapes import ChatShape
from .threads import off_loop
from .validate import FieldNames, check_min_tokens, check_model, integer, output_limit, read_rules, read_user
from .wire import ChatBody


async def chat_completions(request: Request, context: ServerContext) -> Response:
    """Answer a conversation, `n` times."""
    body, size = await read_body(request, ChatBody, context.limits)
    check_model(body.model, context)
    rules = read_rules(body, context)
    logprobs = _read_logprobs(body, context)
    messages = plain_messages(body.messages, context)
    prompt = await off_loop(partial(encode_chat, messages, True, context), size, context.limits.inline_bytes)
    newer = body.max_completion_tokens is not None
    names = FieldNames("messages", "max_completion_tokens" if newer else "max_tokens")
    asked = body.max_completion_tokens if newer else body.max_tokens
    limit = output_limit(asked, None, len(prompt.tokens), names, context.max_model_len)
    check_min_tokens(rules.min_tokens, limit)
    name_user(request.scope, read_user(body.user, context))
    shape = ChatShape(context.tokenizer, scored=logprobs is not None)
    envelope = new_envelope("chatcmpl", [prompt], context)
    return await answer(request, context, rules, Sequences([prompt], [limit], logprobs), shape, envelope)


def _read_logprobs(body: ChatBody, context: ServerContext) -> int | None:
    """How many alternatives to report beside each token; None for no log-probabilities at all."""
    alternatives = integer("top_logprobs", body.top_logprobs, 0, 0, context.limits.logprobs)
    if body.logprobs:
        return alternatives
    if alternatives:
        raise invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true.")
    return None
