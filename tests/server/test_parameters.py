"""Every parameter's range, and what its absence means (docs/api.md, "Parameters")."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from flare.server.validate import SEED_RANGE, choice_seed

from .events import error_of, read_events
from .serving import MAX_MODEL_LEN, Served
from .tiny_tokens import VOCAB_SIZE

MANY_MESSAGES = [{"role": "user", "content": "hi"}] * 9
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]

REFUSED: dict[str, list[Any]] = {
    "temperature": ["1", -0.1, 1e3, []],
    "top_p": ["1", -0.1, 1e3, [], 0],
    "min_p": ["1", -0.1, 1.1, []],
    "repetition_penalty": ["1", -0.1, 1e3, [], 0],
    "presence_penalty": ["0", -2.1, 2.1],
    "frequency_penalty": ["0", -2.1, 2.1],
    "top_k": [-2, -5, 1.5, "1", 1.0],
    "max_tokens": [-1, 1.5, 3.0, "3", True, MAX_MODEL_LEN, 10**30],
    "n": [0, -1, 1000, "2", 1.5],
    "seed": ["1", 1.5],
    "stop": [["x"] * 17, [""], "", ["a", ""], [1], {}, "x" * 1025],
    "stop_token_ids": [[-1], [VOCAB_SIZE], ["a"], 3, list(range(65))],
    "logit_bias": [
        *({"99999": 5}, {"-1": 5}, {"abc": 1}, {str(VOCAB_SIZE): 1}, {"1": 101}, {"1": "x"}, []),
        *({"1" * 5000: 1}, {"²": 1}, {str(token): 0 for token in range(1025)}),
    ],
    "min_tokens": [-1, "1", MAX_MODEL_LEN],
    "ignore_eos": [1, "true"],
    "stream": [1, "true"],
    "stream_options": [{"include_usage": True}, {"include_usage": 1}, []],
    "user": [5, "u" * 513],
    "response_format": [
        *({"type": "json_schema", "schema": {"type": "object"}}, {"type": "banana"}, {}, "text", {"type": 1}),
    ],
    "model": [7],
    "tools": [[{"type": "function"}]],
    "functions": [[{}]],
    "best_of": [2],
    "suffix": ["end"],
    "use_beam_search": [True],
    "max_token": [5],
    "nonsense": [None],
}
COMPLETION_REFUSED: dict[str, list[Any]] = {
    "logprobs": [-1, 21, True, "1"],
    "echo": [1, "yes"],
    "prompt": [
        *("", [], [""], [[]], ["a", ""], [[1], []], [1, "a"], ["a", [1]], [True], {}, None, 1),
        *([-1], [VOCAB_SIZE], [[1, VOCAB_SIZE]], [1.5], [[["a"]]]),
    ],
    "messages": [[]],
}
CHAT_REFUSED: dict[str, list[Any]] = {
    "logprobs": [1, "true"],
    "top_logprobs": [1, -1, 21, "1"],
    "max_completion_tokens": [-1, "3", MAX_MODEL_LEN],
    "messages": [
        *([], None, "hi", [1], [{}], [{"role": "user"}], [{"content": "hi"}], MANY_MESSAGES),
        *(
            [{"role": "user", "content": bad}]
            for bad in (None, [], 3, [{"type": "text"}], [{"type": "x"}], ["a"], IMAGE)
        ),
        *([{"role": "assistant", "content": None}], [{"role": "bad", "content": "hi"}]),
    ],
    "prompt": ["hi"],
}
HARMLESS: dict[str, Any] = {
    **dict.fromkeys(("functions", "suffix", "temperature", "stop", "n", "seed", "user", "max_tokens")),
    **dict.fromkeys(("store", "parallel_tool_calls"), True),
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "tools": [],
    "tool_choice": "none",
    "best_of": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
}


def cases(*tables: dict[str, list[Any]]) -> list[Any]:
    """Every name with every bad value."""
    return [(name, bad) for table in tables for name, values in table.items() for bad in values]


def complete(served: Served, **fields: Any) -> httpx.Response:
    return served.client.post("/v1/completions", json={"prompt": "hi", **fields})


def chat(served: Served, **fields: Any) -> httpx.Response:
    return served.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(("name", "value"), cases(REFUSED, COMPLETION_REFUSED))
def test_completions_refuse_by_name(served: Served, name: str, value: object) -> None:
    error_of(complete(served, **{name: value}), 400, name)
    assert served.engine.requests == []


@pytest.mark.parametrize(("name", "value"), cases(REFUSED, CHAT_REFUSED))
def test_chat_refuses_by_name(served: Served, name: str, value: object) -> None:
    error_of(chat(served, **{name: value}), 400, name)
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "max_tokens"]
)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none_are_refused_by_name(served: Served, name: str, number: str) -> None:
    body = f'{{"prompt":"hi","{name}":{number}}}'.encode()
    error_of(served.client.post("/v1/completions", content=body), 400, name)
    assert complete(served).status_code == 200


def test_numbers_that_are_none_are_found_inside_a_bias(served: Served) -> None:
    body = b'{"prompt":"hi","logit_bias":{"3":NaN}}'
    error_of(served.client.post("/v1/completions", content=body), 400, "logit_bias")


def test_harmless_fields_are_accepted(served: Served) -> None:
    assert complete(served, **HARMLESS).status_code == 200
    assert chat(served, **HARMLESS).status_code == 200


def test_a_misspelt_field_is_explained(served: Served) -> None:
    assert "`max_tokens`" in error_of(complete(served, max_token=5), 400, "max_token")["message"]


@pytest.mark.parametrize(("given", "used"), [(None, 0), (0, 0), (-1, 0), (VOCAB_SIZE, 0), (9_999_999, 0), (5, 5)])
def test_top_k_is_off_in_several_words(served: Served, given: int | None, used: int) -> None:
    assert complete(served, top_k=given).status_code == 200
    assert served.engine.requests[0].sampling.top_k == used


@pytest.mark.parametrize(("given", "used"), [(None, 1.0), (0, 0.0), (1e-30, 0.01), (2, 2.0)])
def test_temperature(served: Served, given: float | None, used: float) -> None:
    assert complete(served, temperature=given).status_code == 200
    assert served.engine.requests[0].sampling.temperature == used


def test_everything_reaches_the_engine(served: Served) -> None:
    fields: dict[str, Any] = {"top_p": 0.5, "min_p": 0.1, "stop": ["a", "b", "a"], "stop_token_ids": [9, 7, 9]}
    penalties = {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}
    more: dict[str, Any] = {"logit_bias": {"7": 2, "3": -100}, "min_tokens": 2, "ignore_eos": True, "user": "ann"}
    assert complete(served, max_tokens=5, logprobs=3, **fields, **penalties, **more).status_code == 200
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.top_p, sampling.min_p, sampling.logit_bias) == (0.5, 0.1, ((3, -100.0), (7, 2.0)))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (request.stop, request.stop_token_ids, request.min_tokens) == (("a", "b"), (7, 9), 2)
    assert (request.ignore_eos, request.max_tokens, request.logprobs, request.prompt_logprobs) == (True, 5, 3, None)
    assert request.client.startswith("user-")
    assert "ann" not in request.client


def test_output_limits(served: Served) -> None:
    complete(served)
    complete(served, prompt="x" * (MAX_MODEL_LEN - 1))
    chat(served)
    chat(served, max_tokens=3, max_completion_tokens=4)
    lengths = [request.max_tokens for request in served.engine.requests]
    prompt = len(served.engine.requests[2].prompt)
    assert lengths == [16, 1, MAX_MODEL_LEN - prompt, 4]


def test_a_prompt_must_leave_room(served: Served) -> None:
    full = "x" * MAX_MODEL_LEN
    assert error_of(complete(served, prompt=full), 400, "prompt")["code"] == "context_length_exceeded"
    error_of(complete(served, prompt=full, max_tokens=1), 400, "max_tokens")
    error_of(complete(served, prompt=full + "x", max_tokens=0), 400, "prompt")
    error_of(complete(served, prompt=[7] * (MAX_MODEL_LEN + 1)), 400, "prompt")
    error_of(complete(served, prompt="x" * (MAX_MODEL_LEN * 13)), 400, "prompt")
    error_of(chat(served, messages=[{"role": "user", "content": full}]), 400, "messages")
    assert complete(served, prompt=full, max_tokens=0).status_code == 200
    assert served.engine.requests == []


def test_min_tokens_may_not_pass_max_tokens(served: Served) -> None:
    error_of(complete(served, max_tokens=3, min_tokens=4), 400, "min_tokens")
    assert complete(served, max_tokens=3, min_tokens=3).status_code == 200


def test_prompts_times_choices_are_limited(served: Served) -> None:
    error_of(complete(served, prompt=["a"] * 65, n=2), 400, "n")
    assert complete(served, prompt=["a"] * 64, n=2).status_code == 200
    assert len(served.engine.requests) == 128


def test_seeds(served: Served) -> None:
    for _ in range(2):
        complete(served, prompt=["a", "b"], n=2, seed=-5)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert seeds[:4] == seeds[4:] == [SEED_RANGE - 5, choice_seed(SEED_RANGE - 5, 1)] * 2
    assert all(0 <= seed < SEED_RANGE for seed in seeds)


def test_without_a_seed_all_differ(served: Served) -> None:
    complete(served, prompt=["a", "b"], n=3)
    complete(served)
    assert len({request.sampling.seed for request in served.engine.requests}) == 7


def test_model_names(served: Served) -> None:
    for model in (None, "tiny", "tiny-alias"):
        assert complete(served, model=model).json()["model"] == "tiny"
    error = error_of(complete(served, model="gpt-9"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "tiny-alias" in error["message"]
    assert served.client.get("/v1/models/tiny-alias").json()["id"] == "tiny-alias"
    error_of(served.client.get("/v1/models/gpt/9"), 404, "model")


def test_stream_options_without_usage(served: Served) -> None:
    events = read_events(complete(served, stream=True, stream_options={"include_usage": False}))
    assert all("usage" not in event for event in events)
