"""Reading safetensors files: named tensors behind a JSON header, read as views of the mapped file.

Knows files only, no model: names mean nothing here.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.cpu.packed_matrix import RowSource
from weir.core.errors import ModelLoadError

INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor without its data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files, as one `weights.TensorSource`.

    Args:
        files: every file of the checkpoint; each is opened and its header checked against its length.

    Raises:
        ModelLoadError: a file is missing, cut short or no safetensors file, or two files have the same tensor.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        self._specs: dict[str, TensorSpec] = {}
        for path in files:
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                if name in self._files:
                    raise ModelLoadError(f"{path}: tensor {name} is also in {self._files[name][0]}")
                self._files[name] = (path, handle)
                self._specs[name] = _spec(path, name, handle)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def location(self, name: str) -> str:
        return str(self._files[name][0])

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file where alignment allows; treat it as read-only."""
        path, handle = self._files[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, ValueError, RuntimeError) as exc:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {exc}") from exc
        return tensor

    def rows(self, name: str) -> RowSource:
        return RowSource.of_floats(self.read(name))


def checkpoint_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory, in the order of their names.

    Raises:
        ModelLoadError: there are none, or the index names a file that is not there.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        single = directory / "model.safetensors"
        found = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
        if not found:
            raise ModelLoadError(f"{directory}: no *.safetensors file")
        return found
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ModelLoadError(f"{index}: not a safetensors index: {exc!r}") from exc
    for name in names:
        if not (directory / name).is_file():
            tensors = [tensor for tensor, file in weight_map.items() if file == name]
            raise ModelLoadError(f"{directory / name}: missing; {INDEX_FILE} says it has {tensors[0]}")
    return [directory / name for name in names]


def check_index(directory: Path, checkpoint: SafetensorsCheckpoint) -> None:
    """Hold the index, where there is one, against what the files really have.

    Raises:
        ModelLoadError: a tensor is not in the file that the index names; names both.
    """
    index = directory / INDEX_FILE
    if not index.exists():
        return
    for name, file in json.loads(index.read_text())["weight_map"].items():
        if name not in checkpoint.specs or checkpoint.location(name) != str(directory / file):
            raise ModelLoadError(f"{directory / file}: tensor {name} is not in it, though {INDEX_FILE} says so")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{path}: missing") from exc
    except (SafetensorError, OSError) as exc:
        raise ModelLoadError(f"{path}: not a whole safetensors file: {exc}") from exc


def _spec(path: Path, name: str, handle: Any) -> TensorSpec:
    header = handle.get_slice(name)
    dtype = _DTYPES.get(header.get_dtype())
    if dtype is None:
        raise ModelLoadError(f"{path}: tensor {name} is {header.get_dtype()}; supported are {', '.join(_DTYPES)}")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(header.get_shape()))
