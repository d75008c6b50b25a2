"""What may propose tokens for a target: a head that was trained for it, or a smaller model of the same tokenizer.

Owns how either looks to a program: a decoder with its own config and weights. Does not own the passes. Surprising rule:
a head is served as a decoder of one layer whose output projection has rows for `kept` tokens alone; all that tells it
from a model is that it reads a hidden state beside each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from .config import ModelConfig
from .source import Int4Groups, WeightSource

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
FUSE, EMBEDDING_NORM, HIDDEN_NORM = "fc.weight", "embedding_norm.weight", "hidden_norm.weight"
FORMAT = "flare-mtp-1"
_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class DraftModel:
    """`config` and `source` of the decoder that proposes. `kept` int32[n], rising: the tokens of its output's rows
    (None: all). `reads_hidden`: it is a head of the target, and begins with `FUSE` over a token and a hidden state."""

    name: str
    config: ModelConfig
    source: WeightSource
    kept: torch.Tensor | None = None
    reads_hidden: bool = False


@dataclass(frozen=True, slots=True)
class HeadSource:
    """The weights of a head, under the names of a decoder; what it shares is the target's."""

    tensors: Mapping[str, torch.Tensor]
    target: WeightSource
    shared_head: str
    kept: torch.Tensor

    def tensor(self, name: str) -> torch.Tensor:
        """See `WeightSource`."""
        if name == EMBEDDING:
            return self.target.tensor(EMBEDDING)
        if name == HEAD:
            return self.target.tensor(self.shared_head)[self.kept.long()]
        own = "output_norm.weight" if name == FINAL_NORM else name.replace(_LAYER, "layer.")
        return self.tensors[own].float()

    def int4_group32(self, name: str) -> Int4Groups | None:
        """Nothing of it is stored in four bits."""
        return None


def load_draft_head(path: Path, config: ModelConfig, target: WeightSource) -> DraftModel:
    """Read a head for this target. Raises ValueError if the file is none, or one for a model of other sizes."""
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ValueError(f"{path}: not a draft head of the format {FORMAT}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a handle, no mapping
    fuse = tensors.get(FUSE)
    if fuse is None or fuse.shape != (config.hidden, 2 * config.hidden):
        raise ValueError(f"{path}: {FUSE} is not [{config.hidden}, {2 * config.hidden}]: a head for another model")
    kept = tensors["kept"].int().contiguous()
    shared = EMBEDDING if config.tie_embeddings else HEAD
    own = msgspec.structs.replace(
        config,
        layers=1,
        vocab=len(kept),
        tie_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    return DraftModel(path.stem, own, HeadSource(tensors, target, shared, kept), kept, reads_hidden=True)


def whole_model(name: str, config: ModelConfig, source: WeightSource, target: ModelConfig) -> DraftModel:
    """A smaller model as the draft of `target`. Raises ValueError if their vocabularies differ."""
    if config.vocab != target.vocab:
        raise ValueError(
            f"the draft model {name} has {config.vocab} tokens, the model that it drafts for {target.vocab}; "
            "name one of the same tokenizer"
        )
    return DraftModel(name, config, source)
