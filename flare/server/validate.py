"""Ranges and rules of the parameters that completions and chat share.

Owns what a parameter may be and what its absence means. Does not own JSON types (`wire`) or prompts (`prompts`).
Surprising rule: only choice 0 draws from the client's seed itself; choice i draws from a seed derived from it, so that
`n` choices differ while the first equals the answer to the same request with `n` 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flare.graphs.frames import Sampling

from .context import Limits, ServerContext
from .errors import ApiError, invalid
from .wire import GenerationBody

SEED_RANGE = 2**63
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64 (Steele, Lea, Flood 2014): it spreads consecutive choices over the seeds."""

CONTEXT_EXCEEDED = "context_length_exceeded"

TEMPERATURE_MIN = 0.01
"""Colder than this, but not 0, is drawn at this: float32 logits would overflow."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How every sequence of a request is generated; `sampling.seed` is unset, `seed` is the client's."""

    sampling: Sampling
    seed: int | None
    choices: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool


def read_rules(body: GenerationBody, context: ServerContext) -> Rules:
    """The shared parameters, checked. Raises `ApiError` 400 naming the field."""
    limits = context.limits
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid("response_format", 'Only the response_format {"type": "text"} is supported.')
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` needs `stream` to be true.")
    options = body.stream_options
    return Rules(
        sampling=_read_sampling(body, context),
        seed=None if body.seed is None else body.seed % SEED_RANGE,
        choices=integer("n", body.n, 1, 1, limits.sequences),
        stop=_read_stop(body.stop, limits),
        stop_token_ids=_read_stop_token_ids(body.stop_token_ids, context),
        min_tokens=integer("min_tokens", body.min_tokens, 0, 0, context.max_model_len),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
    )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice; equal inputs give equal seeds, choice 0 gives `seed`."""
    return (seed + choice * GOLDEN_GAMMA) % SEED_RANGE


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names by which a client knows its prompt and its output limit."""

    prompt: str
    max_tokens: str


def output_limit(asked: int | None, default: int | None, prompt_tokens: int, names: FieldNames, context: int) -> int:
    """How many tokens may be produced. Not asked for: `default` (None: no bound), cut to what the context has left.

    `context` is the context's length in tokens. Raises `ApiError` 400: asked for more than is left, or nothing is left.
    """
    room = context - prompt_tokens
    if asked is not None and asked < 0:
        raise invalid(names.max_tokens, f"`{names.max_tokens}` must be at least 0, not {shown(asked)}.")
    if room < (1 if asked is None else 0):
        raise context_exceeded(names.prompt, prompt_tokens, context)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        message = f"The prompt has {prompt_tokens} tokens and the context holds {context}: at most {room} remain."
        raise invalid(names.max_tokens, message, code=CONTEXT_EXCEEDED)
    return asked


def context_exceeded(param: str, prompt_tokens: int, max_model_len: int) -> ApiError:
    """The 400 for a prompt that leaves no room in the context."""
    message = (
        f"The prompt has {prompt_tokens} tokens; the context holds {max_model_len} and one must be left to generate."
    )
    return invalid(param, message, code=CONTEXT_EXCEEDED)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises `ApiError` 400 where fewer tokens are allowed than demanded."""
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"`min_tokens` ({min_tokens}) is greater than `max_tokens` ({max_tokens}).")


def check_model(model: str | None, context: ServerContext) -> None:
    """Raises `ApiError` 404 for a model that is not served; none at all means the one that is."""
    if model is None or model in context.served_names:
        return
    served = ", ".join(f"`{name}`" for name in context.served_names)
    raise ApiError(
        404, f"The model `{model[:128]}` does not exist. Served: {served}.", param="model", code="model_not_found"
    )


def read_user(user: str | None, context: ServerContext) -> str | None:
    """The client's name for whoever asks. Raises `ApiError` 400 if it is absurdly long."""
    if user is not None and len(user) > context.limits.user_characters:
        raise invalid("user", f"`user` may have at most {context.limits.user_characters} characters.")
    return user


def integer(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """An integer of [low, high]. Raises `ApiError` 400."""
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(name, f"`{name}` must be from {low} to {high}, not {shown(value)}.")
    return value


def shown(value: int) -> str:
    """An integer as text, short whatever the client sent."""
    return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"


def _read_sampling(body: GenerationBody, context: ServerContext) -> Sampling:
    temperature = _number("temperature", body.temperature, 1.0, 0.0, 100.0)
    top_p = _number("top_p", body.top_p, 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise invalid("top_p", "`top_p` must be greater than 0 and at most 1.")
    repetition = _number("repetition_penalty", body.repetition_penalty, 1.0, 0.0, 100.0)
    if repetition == 0.0:
        raise invalid("repetition_penalty", "`repetition_penalty` must be greater than 0; 1 is off.")
    return Sampling(
        temperature=max(temperature, TEMPERATURE_MIN) if temperature > 0.0 else 0.0,
        top_k=_read_top_k(body.top_k, context.vocab_size),
        top_p=top_p,
        min_p=_number("min_p", body.min_p, 0.0, 0.0, 1.0),
        logit_bias=_read_logit_bias(body.logit_bias, context),
        presence_penalty=_number("presence_penalty", body.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", body.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=repetition,
    )


def _number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise invalid(name, f"`{name}` must be from {low:g} to {high:g}, not {value:.15g}.")
    return float(value)


def _read_top_k(value: int | None, vocab_size: int) -> int:
    if value is None:
        return 0
    if value < -1:
        raise invalid("top_k", f"`top_k` must be at least 1, or 0 or -1 for off, not {shown(value)}.")
    return value if 0 < value < vocab_size else 0


def _read_logit_bias(bias: Mapping[str, float] | None, context: ServerContext) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > context.limits.logit_bias:
        raise invalid("logit_bias", f"`logit_bias` may name at most {context.limits.logit_bias} tokens.")
    pairs: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9 and int(key) < context.vocab_size):
            limit = context.vocab_size - 1
            raise invalid("logit_bias", f"`logit_bias` names {key[:32]!r}: token ids go from 0 to {limit}.")
        pairs[int(key)] = _number("logit_bias", value, 0.0, -100.0, 100.0)
    return tuple(sorted(pairs.items()))


def _read_stop(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > limits.stop_strings:
        raise invalid("stop", f"`stop` may hold at most {limits.stop_strings} strings, not {len(strings)}.")
    if "" in strings:
        raise invalid("stop", "`stop` may not hold an empty string.")
    if any(len(string) > limits.stop_characters for string in strings):
        raise invalid("stop", f"A `stop` string may have at most {limits.stop_characters} characters.")
    return tuple(dict.fromkeys(strings))


def _read_stop_token_ids(ids: list[int] | None, context: ServerContext) -> tuple[int, ...]:
    if not ids:
        return ()
    if len(ids) > context.limits.stop_token_ids:
        raise invalid("stop_token_ids", f"`stop_token_ids` may hold at most {context.limits.stop_token_ids} ids.")
    check_token_ids("stop_token_ids", ids, context.vocab_size)
    return tuple(sorted(set(ids)))


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raises `ApiError` 400 unless every id is in the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise invalid(name, f"`{name}` holds a token id outside 0 to {vocab_size - 1}.")
