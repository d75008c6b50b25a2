"""How much a check of a GPU does.

Owns the extents of the large model's part. Does not own the limits of findings. Surprising rule: the defaults are for a
card of 80 GiB or more; tests run the same sections on the fake runtime with next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flare.config.loader import load_recipe
from flare.graphs.catalog import Speculation, build_catalog
from flare.graphs.cuda.device import CudaDevice
from flare.graphs.cuda.plan import DType
from flare.graphs.models.config import ModelConfig
from flare.machines.graph import GraphShape

from .costs import CONTEXT
from .logits import REFERENCES
from .mixed import Load
from .models import LLAMA_3_8B


@dataclass(frozen=True)
class Sizes:
    """The large model and how it is run. `max_model_len` holds two contexts, and a prompt of the largest graph behind
    one. `families` are those of the tiny models. A section that would begin after `time_s` fails in place of that."""

    large: ModelConfig = LLAMA_3_8B
    dtype: DType = "bfloat16"
    slots: int = 64
    max_model_len: int = 3584
    max_prefill_tokens: int = 2048
    context: int = CONTEXT
    frames: int = 200
    repeats: int = 5
    time_s: float = 420.0
    families: tuple[str, ...] = ("llama", "qwen2", "qwen3")
    load: Load = field(default_factory=Load)
    recipe: str = "cuda"
    references: Path = REFERENCES
    kind: type[CudaDevice] = CudaDevice

    def catalog(self) -> tuple[GraphShape, ...]:
        """What a server would prepare for the large model, for which nothing drafts."""
        return build_catalog(
            load_recipe(self.recipe),
            self.slots,
            self.max_prefill_tokens,
            mixed_prefill=True,
            speculation=Speculation(False, None, 64),
        )
