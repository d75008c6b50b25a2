"""Drafts of tiny models: a head of random weights, and the first layers of the model itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.draft import DraftModel, load_draft_head, whole_model
from flare.graphs.models.source import WeightSource
from tools.draft.head import DraftHead, DraftWeights, shapes


def random_head(folder: Path, config: ModelConfig, source: WeightSource, kept: int = 64, seed: int = 7) -> DraftModel:
    """A head that proposes `kept` of the tokens, written to a file and read again."""
    random = np.random.default_rng(seed)
    weights = {
        part: torch.from_numpy(random.integers(-127, 128, shape).astype(np.float32) / 1024)
        for part, shape in shapes(config).items()
    }
    tokens = torch.from_numpy(np.sort(random.choice(config.vocab, kept, replace=False)))
    path = folder / "head.safetensors"
    DraftHead(config, DraftWeights(**weights), tokens).save(path, {})
    return load_draft_head(path, config, source)


def first_layers(config: ModelConfig, source: WeightSource, layers: int = 1) -> DraftModel:
    """The model, cut after some layers."""
    return whole_model("cut", msgspec.structs.replace(config, layers=layers), source, config)
