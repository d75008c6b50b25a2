"""Fields of the files that describe a model.

Owns reading a JSON file, and typed access to its fields or to the metadata of a GGUF file. Does not own their meaning.
Surprising rule: null counts as absent, as it does in the library that writes these files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .errors import ModelError


def read_json(path: Path, missing_ok: bool = False) -> dict[str, object]:
    """The object in the file; an empty one if the file is missing and may be. Raises `ModelError`."""
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}; a model directory needs it") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error


class Fields:
    """Fields of `values`, which came from `where`. Each getter raises `ModelError` naming the field that is missing
    (no default given) or of another type."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def names(self) -> list[str]:
        return list(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._unusable(key, value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._unusable(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._unusable(key, value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._unusable(key, value)
        return value

    def below(self, key: str) -> Fields:
        """The object under `key`, an empty one if there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._unusable(key, value)
        return Fields(value, f"{self._where}, {key}")

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where} lacks {key}; it does not describe a whole model")
        return value

    def _unusable(self, key: str, value: object) -> ModelError:
        return ModelError(f"{self._where} has an unusable value for {key}: {value!r}")
