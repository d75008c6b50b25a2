"""The torch decoder, and the steps built on it, against the reference implementation of each family in float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flare.graphs.memory.pages import PAGE_TOKENS, KvPages
from flare.graphs.models.config import ModelConfig, RopeScaling
from flare.graphs.programs.decoder import Decoder, Span
from flare.model import Model
from tests.graphs.programs_driver import Driver, Tensors, reference
from tests.tiny_models import tiny_config, tiny_tensors

TOLERANCE = 1e-3
IDS = torch.tensor([int(i) for i in torch.randperm(320, generator=torch.Generator().manual_seed(3))[:83]])
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS = {
    "llama": tiny_config(),
    "llama tied": tiny_config(tie_embeddings=True),
    "llama biased": tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama linear rope": tiny_config(rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope": tiny_config(rope_scaling=RopeScaling("llama3", 8.0, original_max_positions=64)),
    "mistral window": tiny_config(sliding_window=40),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
}


def reference_model(config: ModelConfig) -> PreTrainedModel:
    """The same architecture in transformers, without weights of its own choosing."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        rope = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    elif config.rope_scaling is not None:
        rope = LLAMA3 | {"original_max_position_embeddings": config.rope_scaling.original_max_positions}
    common: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attn_implementation": "eager",
    }
    model: PreTrainedModel
    if config.architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    elif config.architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif config.sliding_window is not None:
        model = MistralForCausalLM(MistralConfig(**common, sliding_window=config.sliding_window))
    else:
        biases: dict[str, Any] = {"attention_bias": config.output_bias, "mlp_bias": config.mlp_bias}
        model = LlamaForCausalLM(LlamaConfig(**common, **biases))
    model.train(False)
    return model


@cache
def expected(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tiny weights of a configuration, and the logits of IDS that transformers computes with them."""
    config = CONFIGS[name]
    tensors = {key: tensor.float() / 2 for key, tensor in tiny_tensors(config).items()}
    model = reference_model(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    with torch.inference_mode():
        return tensors, model(IDS[None]).logits[0]


def forward(decoder: Decoder, ids: torch.Tensor, pages: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    """Logits of all of `ids`, consumed in chunks of these lengths, over the given pages."""
    kv = KvPages.allocate(decoder.config, int(pages.max()) + 1, torch.float32)
    logits, start = [], 0
    with torch.inference_mode():
        for length in chunks:
            part = ids[start : start + length]
            hidden = decoder.forward(part, [Span(0, len(part), start, pages)], kv)
            logits.append(decoder.logits(hidden))
            start += length
    return torch.cat(logits)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunks", [(83,), (32, 51), (5, 40, 37, 1)])
def test_logits_match_the_reference_in_any_chunks(name: str, chunks: tuple[int, ...]) -> None:
    tensors, logits = expected(name)
    decoder = Decoder(CONFIGS[name], Tensors(tensors), 128, torch.float32)
    got = forward(decoder, IDS, torch.tensor([2, 0, 5, 1]), chunks)
    assert float((got - logits).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_scored_prefill_and_decode_give_the_reference_probabilities(name: str) -> None:
    tensors, logits = expected(name)
    logprobs = logits.log_softmax(-1)
    ids = IDS.tolist()
    driver = Driver(reference, CONFIGS[name], Tensors(tensors), shuffle=1)
    handle, results = driver.prompt(1, ids[:60], chunk=25, logprobs=3, prompt_logprobs=2)
    scores = [score for result in results for score in result.prompt_scores or ()]
    assert len(scores) == 59
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(logprobs[position, ids[position + 1]]), abs=TOLERANCE)
        assert score.top[0][1] == pytest.approx(float(logprobs[position].max()), abs=TOLERANCE)
        assert len(score.top) == 2
    for position in range(60, 80):  # decode the given text: the pending token is replaced by the one that follows
        driver.program.rows.pending[1] = ids[position]
        result = driver.decode([handle])[0]
        assert result.scores is not None
        for token, logprob in result.scores[0].top:
            assert logprob == pytest.approx(float(logprobs[position, token]), abs=TOLERANCE)
        assert result.scores[0].top[0][1] == pytest.approx(float(logprobs[position].max()), abs=TOLERANCE)


def test_the_default_model_matches_the_reference(default_model: Model) -> None:
    config, weights = default_model.config, default_model.weights
    decoder = Decoder(config, weights, 128, torch.float32)
    model = reference_model(config)
    names = [name for name, _ in model.named_parameters() if name != "lm_head.weight"]
    model.load_state_dict({name: weights.tensor(name) for name in names}, strict=False)
    ids = torch.tensor(default_model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 6, False))[:48]
    with torch.inference_mode():
        logits = model(ids[None]).logits[0]
    got = forward(decoder, ids, torch.arange(-(-len(ids) // PAGE_TOKENS)).flip(0), (20, len(ids) - 21, 1))
    assert float((got - logits).abs().max()) <= TOLERANCE
