"""Reading GGUF files: metadata, and tensors dequantised one at a time.

Knows the container only; what keys and tensor names mean is `gguf_model`'s and `gguf_tokenizer`'s matter. The header of
a file with a vocabulary of 49,152 is read in 0.1 s; the reader of the `gguf` package, which wraps every string in an
array, takes 7 s. Its dequantisation is what is used.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import mmap
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from kernels.cpu.packed_matrix import RowSource
from kernels.cpu.structs import SourceFormat
from weir.core.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_PLAIN_DTYPES = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_BLOCK_FORMATS = {
    gguf.GGMLQuantizationType.Q8_0: SourceFormat.Q8_0,
    gguf.GGMLQuantizationType.Q4_0: SourceFormat.Q4_0,
    gguf.GGMLQuantizationType.Q4_1: SourceFormat.Q4_1,
    gguf.GGMLQuantizationType.Q4_K: SourceFormat.Q4_K,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies and how it is packed.

    Attributes:
        shape: slowest dimension first, as torch counts; the file has it the other way round.
        offset, size_bytes: of its data, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int
    size_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """What `GgufFile.read` gives: the file's own where that is a float type, float32 for quantised data."""
        return _PLAIN_DTYPES.get(self.quantization, torch.float32)


class GgufFile:
    """One mapped GGUF file.

    Raises:
        ModelLoadError: missing, not GGUF, cut short, or packed in a way that is not known; names file and tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError, MemoryError) as exc:
            raise ModelLoadError(f"{path}: cut short or damaged: its header cannot be read: {exc}") from exc

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised; a read-only view of the file for float types."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=tensor.size_bytes, offset=tensor.offset)
        if tensor.quantization in _PLAIN_DTYPES:
            values = torch.from_numpy(raw.copy()).view(tensor.dtype)
            return values.view(tensor.shape)
        try:
            rows = raw.reshape(*tensor.shape[:-1], -1)
            dequantized = gguf.dequantize(rows, tensor.quantization)
        except NotImplementedError as exc:
            kind = tensor.quantization.name
            raise ModelLoadError(f"{self.path}: tensor {name} is packed as {kind}, which is not supported") from exc
        return torch.from_numpy(np.ascontiguousarray(dequantized, dtype=np.float32)).view(tensor.shape)

    def rows(self, name: str) -> RowSource:
        """A matrix's rows: as they lie in the file where the packed forms know their blocks, dequantised otherwise."""
        tensor = self.tensors[name]
        format = _BLOCK_FORMATS.get(tensor.quantization)
        if format is None:
            return RowSource.of_floats(self.read(name), is_quantized=tensor.quantization not in _PLAIN_DTYPES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mapped file cannot be written, and is not
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.size_bytes, offset=tensor.offset)
        return RowSource(raw.view(tensor.shape[0], -1), format, tensor.shape[1], is_quantized=True)

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ModelLoadError(f"{self.path}: not a GGUF file: it starts with {self._map[:4]!r}")
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._map, 4)
        if version not in _VERSIONS:
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3")
        offset = 24
        for _ in range(num_fields):
            name, offset = self._string(offset)
            (kind,) = struct.unpack_from("<I", self._map, offset)
            self.metadata[name], offset = self._value(kind, offset + 4)
        infos = []
        for _ in range(num_tensors):
            name, offset = self._string(offset)
            (num_dimensions,) = struct.unpack_from("<I", self._map, offset)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ModelLoadError(f"{self.path}: tensor {name} has {num_dimensions} dimensions: the file is damaged")
            *dimensions, kind, start = struct.unpack_from(f"<{num_dimensions}QIQ", self._map, offset + 4)
            offset += 4 + 8 * num_dimensions + 12
            infos.append((name, tuple(reversed(dimensions)), kind, start))
        alignment = int(self.metadata.get("general.alignment", 32))
        data_start = offset + -offset % alignment
        for name, shape, kind, start in infos:
            self.tensors[name] = self._tensor(name, shape, kind, data_start + start)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError as exc:
            raise ModelLoadError(f"{self.path}: tensor {name} is packed as type {kind}, which is not known") from exc
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        num_elements = int(np.prod(shape, dtype=np.int64))
        size_bytes = num_elements // block_elements * block_bytes
        if (shape and shape[-1] % block_elements) or offset + size_bytes > len(self._map):
            missing = offset + size_bytes - len(self._map)
            raise ModelLoadError(f"{self.path}: cut short: {missing} bytes are missing at the end of tensor {name}")
        return GgufTensor(name=name, shape=shape, quantization=quantization, offset=offset, size_bytes=size_bytes)

    def _string(self, offset: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, offset)
        end = offset + 8 + length
        if end > len(self._map):
            raise IndexError(f"a string of {length} bytes at {offset}")
        return self._map[offset + 8 : end].decode(), end

    def _value(self, kind: int, offset: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(offset)
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError(f"a value of unknown type {kind} at {offset}")
            (value,) = struct.unpack_from("<" + _SCALARS[kind], self._map, offset)
            return value, offset + struct.calcsize("<" + _SCALARS[kind])
        item_kind, count = struct.unpack_from("<IQ", self._map, offset)
        offset += 12
        if item_kind in _SCALARS:
            layout = f"<{count}{_SCALARS[item_kind]}"
            return list(struct.unpack_from(layout, self._map, offset)), offset + struct.calcsize(layout)
        items = []
        for _ in range(count):
            item, offset = self._value(item_kind, offset)
            items.append(item)
        return items, offset


class GgufParts:
    """A GGUF model in one file, or in the parts that `llama-gguf-split` makes of it, joined.

    Args:
        paths: the files, the first of them with the metadata.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [GgufFile(path) for path in paths]
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self._owners = {name: file for file in self.files for name in file.tensors}
        expected = self.metadata.get("split.tensors.count")
        if expected is not None and expected != len(self._owners):
            raise ModelLoadError(f"{paths[0]}: has {len(self._owners)} tensors in all parts, {expected} were written")

    @property
    def tensors(self) -> dict[str, GgufTensor]:
        return {name: file.tensors[name] for name, file in self._owners.items()}

    def location(self, name: str) -> str:
        return str(self._owners[name].path)

    def read(self, name: str) -> torch.Tensor:
        return self._owners[name].read(name)

    def rows(self, name: str) -> RowSource:
        return self._owners[name].rows(name)
