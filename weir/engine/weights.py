"""From a checkpoint on disk to the tensors of a model, one at a time, each checked against what the model expects.

Tensors already in the wanted dtype stay views of the mapped file, which two workers of one machine then share: of the
540 MB of SmolLM2 in float32 a second worker adds none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from weir.core.errors import ModelLoadError
from weir.engine.safetensors_file import SafetensorsCheckpoint, TensorSpec, write_safetensors
from weir.engine.weight_manifest import WeightManifest

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Buffers that old checkpoints saved though they follow from the configuration."""


class TensorSource(Protocol):
    """A checkpoint: tensors by Hugging Face names."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def location(self, name: str) -> str:
        """The file that has the tensor, for messages."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in the dtype it is stored in; treat it as read-only."""


def open_weights(model_dir: Path) -> TensorSource:
    """Open the weights of a prepared directory.

    Raises:
        ModelLoadError: a file is missing, of another size than when it was prepared, or damaged; names it.
    """
    manifest = WeightManifest.load(model_dir)
    paths = manifest.checked_paths(model_dir)
    if manifest.format != "gguf":
        return SafetensorsCheckpoint(paths)
    from weir.engine.gguf_model import GgufCheckpoint  # its library takes 0.2 s to load

    return GgufCheckpoint(paths[0])


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """One tensor that a model took: stored as `name`, or made of `parts` one below the other."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]


class Weights:
    """Hands out a model's tensors by name, in one dtype on one device, and keeps count of what was taken.

    Args:
        source: the checkpoint.
        dtype: of every tensor handed out.
        device: where they go; on "meta" everything is checked and no data is read.

    Attributes:
        taken: every tensor handed out, in that order.
    """

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._specs = source.specs
        self._dtype = dtype
        self._device = device
        self.taken: list[TakenTensor] = []

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self.taken)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name`.

        Raises:
            ModelLoadError: missing, or not of `shape`; names the tensor and the file.
        """
        self._check(name, shape)
        self.taken.append(TakenTensor(name, (name,), shape))
        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._source.read(name).to(device=self._device, dtype=self._dtype)

    def take_stacked(self, name: str, parts: Sequence[str], rows: Sequence[int], *inner: int) -> torch.Tensor:
        """One tensor [sum(rows), *inner] from its parts one below the other, or as a whole where it is stored as such.

        Raises:
            ModelLoadError: as `take`.
        """
        if name in self._specs:
            return self.take(name, sum(rows), *inner)
        stacked = torch.empty((sum(rows), *inner), dtype=self._dtype, device=self._device)
        self.taken.append(TakenTensor(name, tuple(parts), tuple(stacked.shape)))
        start = 0
        for part, num_rows in zip(parts, rows, strict=True):
            self._check(part, (num_rows, *inner))
            if self._device.type != "meta":
                stacked[start : start + num_rows] = self._source.read(part)
            start += num_rows
        return stacked

    def finish(self, *, allow_unused: Sequence[str] = ()) -> None:
        """Hold what was taken against what there is.

        Raises:
            ModelLoadError: the checkpoint has a tensor that the model did not ask for, so it is another model.
        """
        used = {part for tensor in self.taken for part in tensor.parts}
        for name in sorted(self._specs.keys() - used - set(allow_unused)):
            if not name.endswith(_IGNORED_SUFFIXES):
                raise ModelLoadError(f"{self._source.location(name)}: tensor {name} has no place in this model")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        spec = self._specs.get(name)
        if spec is None:
            raise ModelLoadError(f"tensor {name} is missing from the checkpoint")
        if spec.shape != shape:
            found, needed = list(spec.shape), list(shape)
            raise ModelLoadError(
                f"{self._source.location(name)}: tensor {name} has shape {found}, the model needs {needed}"
            )


def write_fused(path: Path, source: TensorSource, taken: Sequence[TakenTensor]) -> None:
    """Write what a model took from `source` as one safetensors file, stacked tensors as one, in the order of use."""
    parts = {tensor.name: tensor.parts for tensor in taken}
    specs = []
    for tensor in taken:
        dtype = source.specs[tensor.parts[0]].dtype
        for part in tensor.parts[1:]:
            dtype = torch.promote_types(dtype, source.specs[part].dtype)
        specs.append(TensorSpec(name=tensor.name, dtype=dtype, shape=tensor.shape))

    def produce(spec: TensorSpec) -> torch.Tensor:
        return torch.cat([source.read(part).to(spec.dtype) for part in parts[spec.name]])

    write_safetensors(path, specs, produce)
