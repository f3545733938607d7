"""From a checkpoint on disk to the tensors of a model, one at a time, each checked against what the model expects.

A prepared directory says in `weir_weights.json` where its weight files are and what they were when it was prepared.
Tensors already in the wanted dtype stay views of the mapped file, which two workers of one machine then share: of the
540 MB of SmolLM2 in float32 a second worker adds none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from weir.core.errors import ModelLoadError
from weir.engine.gguf_model import GgufCheckpoint
from weir.engine.safetensors_file import SafetensorsCheckpoint, TensorSpec, write_safetensors

MANIFEST_FILE = "weir_weights.json"
_HASH_CHUNK_BYTES = 1 << 22
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file as it was when the model was prepared; `sha256` is of its content."""

    name: str
    size_bytes: int
    sha256: str

    @classmethod
    def measure(cls, path: Path) -> WeightFile:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
        return cls(name=path.name, size_bytes=path.stat().st_size, sha256=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Where the weights of a prepared directory are.

    Attributes:
        format: "safetensors" or "gguf".
        directory: of the files; relative to the manifest's own directory, or absolute.
        files: all of them, in order.
        source_files: the files that the user gave; `files` may be made from them.
    """

    format: str
    directory: str
    files: tuple[WeightFile, ...]
    source_files: tuple[WeightFile, ...]

    def content_hash(self, config_json: str) -> str:
        """Names the weights and the configuration they run under; equal hash, equal KV."""
        listing = [[file.name, file.size_bytes, file.sha256] for file in self.source_files]
        text = json.dumps([listing, config_json], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def load(cls, model_dir: Path) -> WeightManifest:
        """Raises ModelLoadError when the manifest is missing or not one of this version."""
        path = model_dir / MANIFEST_FILE
        try:
            fields = json.loads(path.read_text())
            for key in ("files", "source_files"):
                fields[key] = tuple(WeightFile(**file) for file in fields[key])
            return cls(**fields)
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path}: missing; run `weir model pull` for this model first") from exc
        except (ValueError, TypeError, KeyError) as exc:
            raise ModelLoadError(f"{path}: not a weight manifest of this version: {exc}") from exc

    def open(self, model_dir: Path) -> TensorSource:
        """Open the weights.

        Raises:
            ModelLoadError: a file is missing, of another size than when it was prepared, or damaged; names it.
        """
        directory = (model_dir / self.directory).resolve()
        for file in self.files:
            path = directory / file.name
            if not path.is_file():
                raise ModelLoadError(f"{path}: missing; prepare the model again")
            if (size_bytes := path.stat().st_size) != file.size_bytes:
                raise ModelLoadError(f"{path}: has {size_bytes} bytes, {file.size_bytes} when it was prepared")
        paths = [directory / file.name for file in self.files]
        return GgufCheckpoint(paths[0]) if self.format == "gguf" else SafetensorsCheckpoint(paths)


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
