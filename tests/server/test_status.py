"""What the server says of itself, and its tokenizer's endpoints (docs/api.md)."""

from __future__ import annotations

import pytest

from .events import error_of
from .serving import CREATED, MAX_MODEL_LEN, Served
from .tiny_tokens import IM_END, IM_START, VOCAB_SIZE


def test_health(served: Served) -> None:
    for path, status in (("/health", "serving"), ("/ready", "serving"), ("/live", "live")):
        response = served.client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": status})
        assert served.client.head(path).status_code == 200


def test_models(served: Served) -> None:
    answer = served.client.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["tiny", "tiny-alias"]
    model = served.client.get("/v1/models/tiny").json()
    assert model == answer["data"][0]
    assert (model["object"], model["created"], model["max_model_len"]) == ("model", CREATED, MAX_MODEL_LEN)


def test_metrics_version_graphs(served: Served) -> None:
    metrics = served.client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics.text == "flare:num_requests_running 0\n"
    assert served.client.get("/version").json() == {"version": "1.2.3"}
    assert served.client.get("/graphs").json() == served.engine.graphs()


def test_tokenize_text(served: Served) -> None:
    answer = served.client.post("/tokenize", json={"prompt": "hi<|im_end|>", "model": "tiny"}).json()
    assert answer == {"count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": [104, 105, IM_END], "token_strs": None}
    answer = served.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert served.client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_tokenize_messages(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    tokens = served.client.post("/tokenize", json=body).json()["tokens"]
    assert (tokens.count(IM_START), tokens.count(IM_END)) == (2, 1)
    shorter = served.client.post("/tokenize", json={**body, "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(shorter)] == shorter
    assert shorter[-1] == IM_END


def test_detokenize(served: Served) -> None:
    answer = served.client.post("/detokenize", json={"tokens": [104, 105, IM_END]}).json()
    assert answer == {"prompt": "hi<|im_end|>"}
    assert served.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_tokenize_wants_one_of_two(served: Served, body: dict[str, object]) -> None:
    error_of(served.client.post("/tokenize", json=body), 400, "prompt")


@pytest.mark.parametrize("tokens", [None, [-1], [VOCAB_SIZE], ["a"], "a"])
def test_detokenize_wants_ids(served: Served, tokens: object) -> None:
    error_of(served.client.post("/detokenize", json={"tokens": tokens}), 400, "tokens")


def test_tokenize_refuses_other_models_and_endless_text(served: Served) -> None:
    error_of(served.client.post("/tokenize", json={"prompt": "a", "model": "x"}), 404, "model")
    error_of(served.client.post("/tokenize", json={"prompt": "a" * (MAX_MODEL_LEN * 13)}), 400, "prompt")
