"""A weight matrix of four or eight bits a weight in the order in which `quantized_matmul` reads it on a GPU.

A weight is `(code - zero) * scale`; `group_size` inputs of an output share a scale and a zero. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as functional

from kernels.quantize_rows import E4M3, E4M3_MAX

INT4_GROUP = 32
INT4_STEP = 128


class CodeFormat(StrEnum):
    """What a code is: 0 to 15 less a zero, 8 where there are none; -128 to 127; a float of eight bits (e4m3)."""

    INT4 = "int4"
    INT8 = "int8"
    E4M3 = "e4m3"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Some rows of a matrix, row by row, one byte a code: what checkpoints are turned into and matrices are made of.

    Attributes:
        codes: uint8 [num_rows, num_inputs], the bits of a code.
        scales: [num_rows, num_groups], finite.
        zeros: uint8 [num_rows, num_groups], up to 16; only of INT4.
        group_size: a multiple of 32, or all inputs.
        input_order: int64 [num_inputs], the input that each column is for; None where they are in order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: CodeFormat
    group_size: int
    zeros: torch.Tensor | None = None
    input_order: torch.Tensor | None = None

    @classmethod
    def of_floats(cls, weight: torch.Tensor, format: CodeFormat) -> QuantizedRows:
        """Quantise [num_rows, num_inputs]: INT4 by groups of 32, INT8 and E4M3 with one scale a row.

        Of INT4 the largest weight of a group becomes code 0, which is one step further from the zero than code 15.
        Source: llama.cpp's Q4_0.
        """
        num_rows, num_inputs = weight.shape
        exact = weight.float()
        if format is CodeFormat.INT4:
            num_groups = -(-num_inputs // INT4_GROUP)
            exact = functional.pad(exact, (0, num_groups * INT4_GROUP - num_inputs)).view(num_rows, num_groups, -1)
            largest = exact.gather(2, exact.abs().argmax(2, keepdim=True))
            scales = (largest / -8).to(torch.float16)
            codes = (exact * _inverse(scales.float())).round_().add_(8).clamp_(0, 15).to(torch.uint8)
            codes = codes.view(num_rows, -1)[:, :num_inputs]
            return cls(codes=codes, scales=scales.squeeze(2), format=format, group_size=INT4_GROUP)
        highest = 127.0 if format is CodeFormat.INT8 else E4M3_MAX
        scales = exact.abs().amax(1, keepdim=True) / highest
        scaled = (exact * _inverse(scales)).clamp_(-highest, highest)
        codes = scaled.round_().to(torch.int8) if format is CodeFormat.INT8 else scaled.to(E4M3)
        return cls(codes=codes.view(torch.uint8), scales=scales, format=format, group_size=num_inputs)

    def dequantized(self) -> torch.Tensor:
        """What they stand for: float32 [num_rows, num_inputs], inputs in order."""
        num_inputs = self.codes.shape[1]
        if self.format is CodeFormat.INT4:
            exact = self.codes.float() - (8.0 if self.zeros is None else self._each(self.zeros))
        else:
            exact = self.codes.view(torch.int8 if self.format is CodeFormat.INT8 else E4M3).float()
        weight = exact * self._each(self.scales)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).scatter_(1, self.input_order.expand(len(weight), num_inputs), weight)

    def _each(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_groups] for every input."""
        return of_groups.float().repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A matrix [num_outputs, num_inputs] that rows are multiplied by.

    A step is the inputs of one load, of all outputs one below the other, so that a tile is one contiguous piece of
    memory; a slice those of one product. Of eight bits a step is one slice of bytes and lies in one group. Of four bits
    it is four slices of 32, one in each four bits of its words of sixteen, the lowest first: each is a tile as it
    stands, and nothing is interleaved.

    Attributes:
        codes: [num_steps, num_outputs, slice], int16 of INT4, else uint8; what a last step has too much is 0.
        scales: [num_groups, num_outputs].
        zeros: uint8 [num_groups, num_outputs]; only of INT4.
        num_inputs: weights of an output.
        group_size: inputs that share a scale; `num_inputs` where all do.
        dtype: of rows and results.
        input_order: int64 [num_inputs], the input that each column is for; None where they are in order.
        quantizes_rows: many rows at once may be rounded to e4m3 before the product, by rows where all inputs share a
            scale and else by groups of them, as the checkpoint was made for; only of E4M3.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: CodeFormat
    num_inputs: int
    group_size: int
    dtype: torch.dtype
    zeros: torch.Tensor | None = None
    input_order: torch.Tensor | None = None
    quantizes_rows: bool = False

    @classmethod
    def pack(
        cls, parts: Sequence[QuantizedRows], dtype: torch.dtype, *, quantizes_rows: bool = False
    ) -> QuantizedMatrix:
        """One matrix of `parts`, one below the other; `can_stack` holds for them."""
        first, num_inputs = parts[0], parts[0].codes.shape[1]
        codes = torch.cat([part.codes for part in parts])
        size = INT4_STEP if first.format is CodeFormat.INT4 else _step(first.group_size, num_inputs)
        steps = functional.pad(codes, (0, -num_inputs % size)).view(len(codes), -1, size)
        if first.format is CodeFormat.INT4:
            first_slice, *slices = steps.to(torch.int16).chunk(4, 2)
            steps = first_slice | slices[0] << 4 | slices[1] << 8 | slices[2] << 12
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return cls(
            codes=steps.transpose(0, 1).contiguous(),
            scales=torch.cat([part.scales for part in parts]).t().contiguous(),
            format=first.format,
            num_inputs=num_inputs,
            group_size=first.group_size,
            dtype=dtype,
            zeros=torch.cat(zeros).t().contiguous() if zeros else None,
            input_order=first.input_order,
            quantizes_rows=quantizes_rows,
        )

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[1]

    def unpacked(self, outputs: torch.Tensor | slice = slice(None)) -> QuantizedRows:
        """The rows of `outputs`, all by default."""
        codes = self.codes[:, outputs]
        if self.format is CodeFormat.INT4:
            codes = torch.cat([codes >> shift & 15 for shift in (0, 4, 8, 12)], 2).to(torch.uint8)
        rows = codes.transpose(0, 1).flatten(1)
        return QuantizedRows(
            codes=rows[:, : self.num_inputs].contiguous(),
            scales=self.scales[:, outputs].t(),
            format=self.format,
            group_size=self.group_size,
            zeros=None if self.zeros is None else self.zeros[:, outputs].t(),
            input_order=self.input_order,
        )


def can_stack(parts: Sequence[QuantizedRows]) -> bool:
    """Whether one matrix can be made of `parts`: all of a kind, inputs in one order."""
    first = parts[0]
    order = first.input_order
    return all(
        (part.format, part.group_size, part.scales.dtype, part.zeros is None)
        == (first.format, first.group_size, first.scales.dtype, first.zeros is None)
        and (
            part.input_order is order
            or (part.input_order is not None and order is not None and torch.equal(part.input_order, order))
        )
        for part in parts
    )


def _step(group_size: int, num_inputs: int) -> int:
    """Inputs of one product of eight bits: as many as a group allows, up to 128."""
    return next(size for size in (128, 64, 32) if group_size >= num_inputs or group_size % size == 0)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scales, 0 for 0."""
    return torch.where(scales == 0, 0.0, 1 / scales)
