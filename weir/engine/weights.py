"""From a checkpoint on disk to the tensors of a model, one at a time, each checked against what the model expects.

Tensors already in the wanted dtype stay views of the mapped file, which two workers of one machine then share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kernels.cpu.packed_matrix import RowSource
from kernels.linear import AnyMatrix, InvariantMatrix
from weir.core.errors import ModelLoadError
from weir.engine.safetensors_file import TensorSpec

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

    def rows(self, name: str) -> RowSource:
        """A matrix's rows as they are stored, where the packed forms know that format, or else as `read` gives them."""


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """One tensor that a model took: stored as `name`, or made of `parts` one below the other.

    Attributes:
        is_matrix: rows are multiplied by it.
        is_gated: a matrix whose first half of outputs gates the second.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    is_matrix: bool = False
    is_gated: bool = False


class Weights:
    """Hands out a model's tensors by name, in one dtype on one device, and keeps count of what was taken.

    Args:
        source: the checkpoint.
        dtype: of every tensor handed out.
        device: where they go; on "meta" everything is checked and no data is read.
        packed: gives matrices in another form; None leaves them tensors.
        is_batch_invariant: tensors become matrices whose products do not depend on the batch.

    Attributes:
        taken: every tensor handed out, in that order.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        packed: Callable[[TakenTensor], AnyMatrix] | None = None,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        self._is_batch_invariant = is_batch_invariant
        self._source = source
        self._packed = packed
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

    def take_scales(self, names: Sequence[str], count: int) -> torch.Tensor:
        """`count` factors, float32 [count]: the first of `names` that is stored, one for all or each, or else ones.

        Raises:
            ModelLoadError: as `take`, or a factor is not positive.
        """
        for name in names:
            if name in self._specs:
                shape = self._specs[name].shape
                if torch.Size(shape).numel() not in (1, count):
                    raise ModelLoadError(
                        f"{self._source.location(name)}: tensor {name} has shape {list(shape)}, the model needs one "
                        f"factor or {count}"
                    )
                self.taken.append(TakenTensor(name, (name,), shape))
                if self._device.type == "meta":
                    break
                scales = self._source.read(name).to(torch.float32).flatten()
                if not bool((scales > 0).all()):
                    raise ModelLoadError(
                        f"{self._source.location(name)}: tensor {name} has factors that are not above 0"
                    )
                return scales.expand(count).to(self._device)
        return torch.ones(count, dtype=torch.float32, device=self._device)

    def take_matrix(self, name: str, num_outputs: int, num_inputs: int) -> AnyMatrix:
        """The tensor `name` as something that rows are multiplied by. Raises as `take`."""
        return self.take_stacked_matrix(name, (name,), (num_outputs,), num_inputs)

    def take_stacked_matrix(
        self, name: str, parts: Sequence[str], num_outputs: Sequence[int], num_inputs: int, *, is_gated: bool = False
    ) -> AnyMatrix:
        """As `take_stacked`, as something that rows are multiplied by."""
        if self._packed is None:
            matrix = self.take_stacked(name, parts, num_outputs, num_inputs)
            self.taken[-1] = replace(self.taken[-1], is_matrix=True, is_gated=is_gated)
            return InvariantMatrix(matrix) if self._is_batch_invariant else matrix
        if name in self._specs:
            parts, num_outputs = (name,), (sum(num_outputs),)
        for part, num_rows in zip(parts, num_outputs, strict=True):
            self._check(part, (num_rows, num_inputs))
        taken = TakenTensor(name, tuple(parts), (sum(num_outputs), num_inputs), is_matrix=True, is_gated=is_gated)
        self.taken.append(taken)
        return self._packed(taken)

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
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise ModelLoadError(
                f"{self._source.location(name)}: tensor {name} is {spec.dtype}, not floats of 16 or 32 bits"
            )
        if spec.shape != shape:
            found, needed = list(spec.shape), list(shape)
            raise ModelLoadError(
                f"{self._source.location(name)}: tensor {name} has shape {found}, the model needs {needed}"
            )
