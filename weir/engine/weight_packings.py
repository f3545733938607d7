"""How checkpoints of quantised models store a matrix, each way one class: found by the name of its main tensor, made
into `QuantizedRows`. Knows no model.

Source: AutoGPTQ and GPTQModel, `qlinear`; AutoAWQ, `packing_utils`; vllm-project/compressed-tensors, `compressors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.quantize_rows import E4M3
from kernels.quantized_matrix import CodeFormat, QuantizedRows
from weir.core.errors import ModelLoadError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, whose code is in each four bits of a word, from the lowest."""
BLOCK = 128

Read = Callable[[str], torch.Tensor]


class Packing(Protocol):
    """One way to store a matrix [num_outputs, num_inputs] as several tensors `base.*`.

    Attributes:
        main: what the name of the tensor with the codes ends with, after the base.
        others: what the names of those beside it end with.
        main_dtypes: of the codes; a main tensor of another dtype is a matrix that was left as it was.
        quantizes_rows: see `QuantizedMatrix`.
    """

    @property
    def main(self) -> str: ...

    @property
    def others(self) -> tuple[str, ...]: ...

    @property
    def main_dtypes(self) -> tuple[torch.dtype, ...]: ...

    @property
    def quantizes_rows(self) -> bool: ...

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The matrix's shape, of its main tensor's."""

    def rows(self, read: Read, names: frozenset[str]) -> QuantizedRows:
        """The matrix. `read` gives a tensor by what its name ends with; `names` are those there are.

        Raises:
            ModelLoadError: the tensors say something that a `QuantizedMatrix` cannot be.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqPacking:
    """Words of 32 bits hold codes of neighbouring inputs; zeros are stored one less, but for `is_v2`.

    Attributes:
        group_size: None for a whole row.
    """

    bits: int
    group_size: int | None
    is_v2: bool = False
    main: str = "qweight"
    others: tuple[str, ...] = ("qzeros", "scales", "g_idx")
    main_dtypes: tuple[torch.dtype, ...] = (torch.int32,)
    quantizes_rows: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[1], stored[0] * 32 // self.bits

    def rows(self, read: Read, names: frozenset[str]) -> QuantizedRows:
        codes = _unpacked(read("qweight").t(), self.bits)
        zeros = _unpacked(read("qzeros"), self.bits).t() + (0 if self.is_v2 else 1)
        order = _input_order(read("g_idx"), self.group_size) if "g_idx" in names else None
        return _integers(codes, read("scales").t(), zeros, self.bits, self.group_size, order)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqPacking:
    """Words of 32 bits hold codes of eight neighbouring outputs in `AWQ_ORDER`."""

    group_size: int | None
    main: str = "qweight"
    others: tuple[str, ...] = ("qzeros", "scales")
    main_dtypes: tuple[torch.dtype, ...] = (torch.int32,)
    quantizes_rows: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[1] * 8, stored[0]

    def rows(self, read: Read, names: frozenset[str]) -> QuantizedRows:
        codes, zeros = (_in_awq_order(_unpacked(read(name), 4)).t() for name in ("qweight", "qzeros"))
        return _integers(codes, read("scales").t(), zeros, 4, self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPacking:
    """Words of 32 bits hold codes of neighbouring inputs, and zeros of neighbouring outputs."""

    bits: int
    group_size: int | None
    main: str = "weight_packed"
    others: tuple[str, ...] = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale")
    main_dtypes: tuple[torch.dtype, ...] = (torch.int32,)
    quantizes_rows: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored[0], stored[1] * 32 // self.bits

    def rows(self, read: Read, names: frozenset[str]) -> QuantizedRows:
        codes = _unpacked(read("weight_packed"), self.bits)
        scales = read("weight_scale")
        zeros = None
        if "weight_zero_point" in names:
            zeros = _unpacked(read("weight_zero_point").t(), self.bits).t()[: len(codes)]
        order = _input_order(read("weight_g_idx"), self.group_size) if "weight_g_idx" in names else None
        return _integers(
            codes, scales.reshape(len(scales), -1).expand(len(codes), -1), zeros, self.bits, self.group_size, order
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BytePacking:
    """A code a byte, int8 or e4m3, with scales of the whole, of outputs, of groups, or of blocks of 128 by 128.

    Attributes:
        scale: what the name of the scales ends with.
    """

    scale: str
    group_size: int | None
    has_blocks: bool = False
    quantizes_rows: bool = False
    main: str = "weight"
    main_dtypes: tuple[torch.dtype, ...] = (torch.int8, E4M3)

    @property
    def others(self) -> tuple[str, ...]:
        return self.scale, "input_scale", "weight_shape"

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def rows(self, read: Read, names: frozenset[str]) -> QuantizedRows:
        codes, scales = read("weight"), read(self.scale).float()
        num_outputs, num_inputs = codes.shape
        if self.has_blocks:
            scales = scales.repeat_interleave(BLOCK, 0)[:num_outputs]
        else:
            scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        return QuantizedRows(
            codes=codes.view(torch.uint8),
            scales=scales.expand(num_outputs, -1),
            format=CodeFormat.INT8 if codes.dtype == torch.int8 else CodeFormat.E4M3,
            group_size=BLOCK if self.has_blocks else self.group_size or num_inputs,
        )


def _integers(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bits: int,
    group_size: int | None,
    order: torch.Tensor | None = None,
) -> QuantizedRows:
    """Of codes from 0 on, [num_rows, num_inputs], zeros [num_rows, num_groups]."""
    middle = 1 << (bits - 1)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if bits == 8:
        if zeros is not None:
            raise ModelLoadError("zero points of eight bits that are not 128 are not supported")
        codes = codes - middle  # modulo 256: the same numbers as int8
    return QuantizedRows(
        codes=codes if order is None else codes[:, order],
        scales=scales,
        format=CodeFormat.INT4 if bits == 4 else CodeFormat.INT8,
        group_size=group_size or codes.shape[1],
        zeros=zeros,
        input_order=order,
    )


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] to uint8 [n, m * 32 / bits], the lowest bits of a word first."""
    bytes_ = words.contiguous().view(torch.uint8)
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1)


def _in_awq_order(codes: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(AWQ_ORDER, device=codes.device).argsort()
    return codes.view(len(codes), -1, 8)[:, :, places].flatten(1)


def _input_order(groups: torch.Tensor, group_size: int | None) -> torch.Tensor | None:
    """The inputs by their groups; None where they are so already, or all have one."""
    if group_size is None:
        return None
    in_order = torch.arange(len(groups), device=groups.device) // group_size
    if torch.equal(groups.long(), in_order):
        return None
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], in_order):
        raise ModelLoadError(f"g_idx does not give each group its {group_size} inputs")
    return order
