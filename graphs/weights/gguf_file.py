"""The container of a GGUF file: metadata, and where each tensor lies.

Owns parsing of the header into plain Python values and memory-mapped bytes of tensors. Does not own what the values
mean (`gguf_config`, `gguf_source`). Surprising rule: the `gguf` package reads headers too, but makes a numpy array of
every string of the vocabulary, which takes seconds; its tables of types and its dequantizers are used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from .errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order (outermost first), `type_name` as ggml spells it."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header and the mapped file. `metadata` holds str, int, float, bool and lists of them."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]
    mapping: mmap.mmap

    def rows(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The stored bytes, uint8[prod(shape[:-1]), bytes of a row], a read-only view of the file."""
        stored = np.frombuffer(self.mapping, np.uint8, count=tensor.end - tensor.begin, offset=tensor.begin)
        return stored.reshape(math.prod(tensor.shape[:-1]), -1)


class _Cursor:
    """Reads values one after the other; running past the end raises `struct.error` or `ValueError`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.offset = len(MAGIC)

    def scalar(self, format: str) -> int | float | bool:
        (value,) = struct.unpack_from(format, self.mapping, self.offset)
        self.offset += struct.calcsize(format)
        assert isinstance(value, int | float)
        return value

    def count(self, format: str = "<Q") -> int:
        return int(self.scalar(format))

    def string(self) -> str:
        begin = self.offset + 8
        end = begin + self.count()
        if end > len(self.mapping):
            raise ValueError("a string runs past the end of the file")
        self.offset = end
        return self.mapping[begin:end].decode()

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item_kind, length = self.count("<I"), self.count()
            return self.array(item_kind, length)
        return self.scalar(SCALARS[kind])

    def array(self, kind: int, length: int) -> list[object]:
        if kind in (STRING, ARRAY):
            read: Callable[[], object] = self.string if kind == STRING else lambda: self.value(ARRAY)
            return [read() for _ in range(length)]
        items = np.frombuffer(self.mapping, np.dtype(SCALARS[kind]), count=length, offset=self.offset)
        self.offset += items.nbytes
        return list(items.tolist())


def open_gguf(path: Path) -> GgufFile:
    """Map the file and parse its header.

    Raises `ModelError` if it is not a GGUF file, of another version or byte order, or cut short.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model file {path}: {error}") from error
    if mapping[: len(MAGIC)] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    cursor = _Cursor(mapping)
    try:
        version = cursor.count("<I")
        if version not in VERSIONS:
            raise ModelError(f"{path} has GGUF version {version}; supported are 2 and 3 in little-endian byte order")
        return _parse(path, cursor)
    except (struct.error, ValueError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"the header of {path} is damaged or cut short ({error}); fetch the file again") from error


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    tensor_count, metadata_count = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.count("<I"))
    placed: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = tuple(cursor.count() for _ in range(cursor.count("<I")))
        placed.append((name, dimensions[::-1], cursor.count("<I"), cursor.count()))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_begin = -(-cursor.offset // alignment) * alignment
    tensors = {item[0]: _locate(path, *item, data_begin=data_begin) for item in placed}
    if tensors and (end := max(tensor.end for tensor in tensors.values())) > len(cursor.mapping):
        raise ModelError(f"{path} is cut short: it has {len(cursor.mapping)} of {end} bytes; fetch the file again")
    return GgufFile(path, metadata, tensors, cursor.mapping)


def _locate(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, data_begin: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ModelError(f"tensor {name} in {path} has unknown type number {kind}") from error
    block_items, block_bytes = GGML_QUANT_SIZES[quantization]
    if not shape or shape[-1] % block_items:
        raise ModelError(f"tensor {name} in {path} has shape {list(shape)}, not whole blocks of {quantization.name}")
    size = math.prod(shape) // block_items * block_bytes
    begin = data_begin + offset
    return GgufTensor(name, shape, quantization.name, begin, begin + size)
