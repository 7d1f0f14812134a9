"""The GGUF container: metadata and tensor data of one memory-mapped file.

The ``gguf`` package does the dequantization. Its reader makes an array of each element of a metadata list, which for a
vocabulary takes seconds, so the header is parsed here. Layout: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from attrs import frozen
from gguf import GGMLQuantizationType, GGUFValueType

from ..models.errors import ModelLoadError, UnsupportedModel

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LENGTH = struct.Struct("<Q")
_SCALARS: Mapping[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@frozen(kw_only=True)
class GGUFTensor:
    """Where a tensor is. ``shape`` is torch's order (rows first), ``offset`` and ``num_bytes`` are of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, opened: ``metadata`` by key and ``tensors`` by name.

    Raises:
        ModelLoadError: the file is not GGUF, or is cut off.
        UnsupportedModel: a version, byte order or data type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Copy on write: torch wants memory that could be written. A plain array slices faster than a memmap.
            self._data: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="c"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(self._data)
        try:
            self.metadata, self.tensors = self._read_header(cursor)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise ModelLoadError(f"{path} is corrupt or cut off near byte {cursor.position}: {error}") from error

    def array(self, name: str) -> npt.NDArray[Any]:
        """One tensor as numbers, dequantized to float32 where it is quantized.

        Raises:
            UnsupportedModel: a quantization that the gguf package cannot dequantize.
        """
        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        try:
            return gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except RuntimeError as error:
            raise UnsupportedModel(
                f"{self.path}: tensor {name!r} has type {tensor.kind.name}, which the gguf package cannot dequantize"
            ) from error

    def _read_header(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if bytes(self._data[:4]) != _MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not start with {_MAGIC.decode()!r}")
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(f"{self.path} has GGUF version {version} (or big-endian order); readable: 2 and 3")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [_TensorInfo.read(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ModelLoadError(
                f"{self.path}: general.alignment must be a power of two of at least 8, got {alignment}"
            )
        start = -(-cursor.position // alignment) * alignment
        return metadata, {info.name: self._located(info, start) for info in infos}

    def _located(self, info: _TensorInfo, start: int) -> GGUFTensor:
        where = f"{self.path}: tensor {info.name!r}"
        try:
            kind = GGMLQuantizationType(info.kind)
        except ValueError as error:
            raise UnsupportedModel(f"{where} has unknown data type {info.kind}") from error
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not math.prod(info.shape) or not info.shape or info.shape[-1] % block_size:
            raise ModelLoadError(f"{where} of shape {list(info.shape)} is not whole {kind.name} blocks")
        num_bytes = math.prod(info.shape) // block_size * block_bytes
        offset = start + info.offset
        if info.offset % 8:
            raise ModelLoadError(f"{where} starts at byte {info.offset} of the data, which is not aligned")
        if offset + num_bytes > len(self._data):
            raise ModelLoadError(
                f"{where} ends {offset + num_bytes - len(self._data)} bytes after the file: it is cut off"
            )
        return GGUFTensor(name=info.name, shape=info.shape, kind=kind, offset=offset, num_bytes=num_bytes)


class _TensorInfo(NamedTuple):
    """A tensor as the header lists it; ``offset`` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> _TensorInfo:
        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        return cls(name, tuple(reversed(dimensions)), cursor.scalar("I"), cursor.scalar("Q"))


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = memoryview(data)  # pyright: ignore[reportArgumentType] (arrays are buffers)
        self.position = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self._data, self.position)[0]
        self.position += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self.position)
        start = self.position + _LENGTH.size
        self.position = start + length
        if self.position > len(self._data):
            raise struct.error(f"a string of {length} bytes reaches beyond the end")
        return str(self._data[start : self.position], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise struct.error(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self.position)
            self.position += struct.calcsize(f"<{length}{_SCALARS[kind]}")
            return list(values)
        if kind == GGUFValueType.STRING:  # a vocabulary: a hundred thousand strings
            return [self.string() for _ in range(length)]
        return [self.value(kind) for _ in range(length)]
