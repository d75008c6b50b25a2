"""From checked requests to answers.

Owns submitting the sequences of one HTTP request and choosing how they are answered. Does not own prompts, parameters
or the JSON of a choice. Surprising rule: choices are numbered prompt by prompt, `n` for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import Response

from flare.request import GenerationRequest

from .auth import client_of
from .context import ServerContext
from .engine_api import OutputStream
from .envelope import Envelope, json_line
from .output import NothingToGenerate, collect
from .prompts import Prompt
from .shapes import Shape
from .sse import ChunkWriter, TokenEvents
from .validate import Rules, choice_seed


@dataclass(frozen=True, slots=True)
class Sequences:
    """What is to be generated: prompts and, for each, how many tokens at most. `logprobs` and `prompt_logprobs`: None
    for none, else the number of alternatives."""

    prompts: Sequence[Prompt]
    max_tokens: Sequence[int]
    logprobs: int | None
    prompt_logprobs: int | None = None


async def answer(
    request: Request, context: ServerContext, rules: Rules, sequences: Sequences, shape: Shape, envelope: Envelope
) -> Response:
    """Generate and answer. Raises what `EngineApi.submit` and the streams raise."""
    requests = [
        _generation(f"{envelope.id}-{index}", client_of(request.scope), rules, sequences, prompt, seed)
        for index, (prompt, seed) in enumerate(_numbered(context, rules, len(sequences.prompts)))
    ]
    streams = _submit(context, requests)
    if rules.stream:
        writer = ChunkWriter(envelope, shape, len(streams), rules.include_usage)
        return TokenEvents(streams, writer, context.ping_interval_s)
    deltas = await collect(streams, request.receive)
    body = envelope.fields(shape.object_name)
    body["choices"] = [shape.choice(index, delta) for index, delta in enumerate(deltas)]
    body["usage"] = envelope.usage(sum(delta.completion_tokens for delta in deltas))
    return Response(json_line(body), media_type="application/json")


def new_envelope(prefix: str, prompts: Sequence[Prompt], context: ServerContext) -> Envelope:
    """The identity of a new answer, such as `cmpl-1f…`."""
    return Envelope(
        id=f"{prefix}-{context.random_bits():016x}",
        created=context.unix_s(),
        model=context.served_names[0],
        prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
    )


def _numbered(context: ServerContext, rules: Rules, prompts: int) -> list[tuple[int, int]]:
    """For each sequence the number of its prompt, and the seed of its choice."""
    seeds = [context.random_bits() if rules.seed is None else rules.seed for _ in range(prompts)]
    return [
        (prompt, choice_seed(seeds[prompt], choice)) for prompt in range(prompts) for choice in range(rules.choices)
    ]


def _generation(
    name: str, client: str, rules: Rules, sequences: Sequences, prompt: int, seed: int
) -> GenerationRequest:
    return GenerationRequest(
        name=name,
        client=client,
        prompt=sequences.prompts[prompt].tokens,
        max_tokens=sequences.max_tokens[prompt],
        sampling=replace(rules.sampling, seed=seed),
        endpoints=sequences.prompts[prompt].endpoints,
        stop=rules.stop,
        stop_token_ids=rules.stop_token_ids,
        ignore_eos=rules.ignore_eos,
        min_tokens=rules.min_tokens,
        logprobs=sequences.logprobs,
        # The choices of one prompt share its scores, but each must report them.
        prompt_logprobs=sequences.prompt_logprobs,
    )


def _submit(context: ServerContext, requests: Sequence[GenerationRequest]) -> Sequence[OutputStream]:
    """Streams of all requests; one for no tokens and no scores is answered here."""
    if all(request.max_tokens == 0 and request.prompt_logprobs is None for request in requests):
        return [NothingToGenerate() for _ in requests]
    return context.engine.submit(requests)
