"""`flare run --device sim`: real HTTP and the default model's tokenizer, and words by chance."""

from __future__ import annotations

import re

from tests.server.model_server import run_model


def test_it_answers_with_words_and_says_which_device_serves() -> None:
    with run_model("--device", "sim") as server:
        request = {"messages": [{"role": "user", "content": "Hello"}]}
        first, second = (server.client.post("/v1/chat/completions", json=request).json() for _ in range(2))
        choice = first["choices"][0]
        assert re.fullmatch(r"( [a-z]+){20,}", choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"]
        server.log.seek(0)
        assert b"device.chosen" in server.log.read()
