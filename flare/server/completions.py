"""POST /v1/completions.

Owns what is particular to completions: several prompts, echo, and scores of the prompt. Surprising rule: without tokens
to generate, the engine is asked only if the prompt's scores are wanted.
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
from .prompts import Prompt, encode_prompt, split_prompts
from .shapes import CompletionShape
from .threads import off_loop
from .validate import FieldNames, check_min_tokens, check_model, integer, output_limit, read_rules, read_user
from .wire import CompletionBody

DEFAULT_MAX_TOKENS = 16
NAMES = FieldNames(prompt="prompt", max_tokens="max_tokens")


async def completions(request: Request, context: ServerContext) -> Response:
    """Complete one or several prompts, `n` times each."""
    body, size = await read_body(request, CompletionBody, context.limits)
    check_model(body.model, context)
    rules = read_rules(body, context)
    logprobs = None if body.logprobs is None else integer("logprobs", body.logprobs, 0, 0, context.limits.logprobs)
    items = split_prompts(body.prompt)
    if len(items) * rules.choices > context.limits.sequences:
        raise invalid("n", f"{len(items)} prompts times `n` is more than {context.limits.sequences} sequences.")
    work = partial(_encode_all, items, context)
    prompts = await off_loop(work, size, context.limits.inline_bytes)
    limits = [
        output_limit(body.max_tokens, DEFAULT_MAX_TOKENS, len(prompt.tokens), NAMES, context.max_model_len)
        for prompt in prompts
    ]
    check_min_tokens(rules.min_tokens, min(limits))
    name_user(request.scope, read_user(body.user, context))
    echo = bool(body.echo)
    shape = CompletionShape(
        context.tokenizer,
        [prompt for prompt in prompts for _ in range(rules.choices)],
        echo,
        logprobs,
    )
    sequences = Sequences(prompts, limits, logprobs, logprobs if echo else None)
    return await answer(request, context, rules, sequences, shape, new_envelope("cmpl", prompts, context))


def _encode_all(items: list[str | list[int]], context: ServerContext) -> list[Prompt]:
    return [encode_prompt(item, context) for item in items]
