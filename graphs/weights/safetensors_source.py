"""Weights from a directory of safetensors, whole or in shards.

Owns finding the files, their index, and conversion to float32. Does not own the configuration (`hf_config`). Surprising
rule: files stay mapped and each tensor is copied out when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from flare.graphs.models.config import ModelConfig
from flare.graphs.models.source import Int4Groups

from .errors import ModelError
from .fields import Fields, read_json
from .layout import check_layout

SUPPORTED_TYPES = ("F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> Sequence[int]: ...


class _Opened(Protocol):
    """What is used of the library's handle, which has no types of its own."""

    def keys(self) -> Iterable[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsSource:
    """A `WeightSource` over mapped files. Raises `ModelError` at once when a file or tensor is missing, damaged,
    unknown, of another shape, or stored in an unsupported type."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._opened = {path: _open(path) for path in _files(folder)}
        self._holder: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, opened in self._opened.items():
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings):
                    continue
                part = opened.get_slice(name)
                if part.get_dtype() not in SUPPORTED_TYPES:
                    raise ModelError(
                        f"tensor {name} in {path} is stored as {part.get_dtype()}; "
                        f"supported are {', '.join(SUPPORTED_TYPES)}"
                    )
                self._holder[name] = path
                shapes[name] = tuple(part.get_shape())
        check_layout(config, shapes, str, folder)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as float32, a fresh copy. Raises `KeyError` if the model has none of that name."""
        stored = self._opened[self._holder[name]].get_tensor(name)
        return stored.to(torch.float32, copy=True)

    def int4_group32(self, name: str) -> Int4Groups | None:
        """Safetensors are never kept so here."""
        return None


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = Fields(read_json(folder / INDEX), str(folder / INDEX)).below("weight_map")
        names = sorted({index.text(name) for name in index.names()})
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{folder / INDEX} names a file outside its directory")
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).exists():
            raise ModelError(f"{folder} has no {name}; weights must be safetensors, whole or with {INDEX}")
    return [folder / name for name in names]


def _open(path: Path) -> _Opened:
    try:
        opened: _Opened = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again") from error
    return opened
