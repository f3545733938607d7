"""Products with weights of four and eight bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as functional

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import DTYPE, ELEMENT_BYTES, KernelCase, Trial, Work, random_rows
from kernels.gpu.quantize_rows import quantize_rows_triton
from kernels.gpu.quantized_matmul import MIN_E4M3_ROWS, dequantize_triton, quantized_matmul_triton
from kernels.quantize_rows import E4m3Rows, quantize_rows_reference
from kernels.quantized_matmul import quantized_matmul_reference
from kernels.quantized_matrix import INT4_GROUP, CodeFormat, QuantizedMatrix, QuantizedRows
from tests.kernels.paged_pool import rms_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatmul(Work):
    """With `rounds_rows` they are rounded to e4m3, too."""

    kernels: ClassVar = ("quantized_matmul", "weight_codes", "quantize_rows")
    does: ClassVar = "product with weights of four or eight bits"
    bytes_formula: ClassVar = "outputs · inputs · bits / 8 + bytes of scales + rows · (inputs + outputs) · e"
    flops_formula: ClassVar = "2 · rows · outputs · inputs"

    format: CodeFormat
    num_rows: int
    num_outputs: int
    num_inputs: int
    rounds_rows: bool = False

    @property
    def shape(self) -> str:
        rows = "rows in e4m3" if self.rounds_rows else "rows"
        return f"{self.num_rows:,} {rows}, {self.num_inputs:,} to {self.num_outputs:,}, weights in {self.format}"

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9) if self.rounds_rows else (0, 0)

    @property
    def floor(self) -> Floor:
        products = self.num_outputs * self.num_inputs
        if self.format is CodeFormat.INT4:
            weight_bytes = products // 2 + self.num_outputs * -(-self.num_inputs // INT4_GROUP) * 2
        else:
            weight_bytes = products + self.num_outputs * 4
        row_bytes = self.num_rows * (self.num_inputs + self.num_outputs) * ELEMENT_BYTES
        return Floor(num_bytes=weight_bytes + row_bytes, flops=2 * self.num_rows * products)

    def make(self, device: torch.device) -> Trial:
        rows = random_rows(self.num_rows, self.num_inputs, device=device)
        dense = random_rows(self.num_outputs, self.num_inputs, device=device, scale=self.num_inputs**-0.5)
        parts = [QuantizedRows.of_floats(dense, self.format)]
        weight = QuantizedMatrix.pack(parts, DTYPE, quantizes_rows=self.rounds_rows)
        launch = partial(quantized_matmul_triton, rows, weight, multiplies_e4m3=self.rounds_rows)
        return Trial(
            launch=launch,
            error=lambda: rms_ratio(
                launch(), quantized_matmul_reference(rows, weight, quantizes_rows=self.rounds_rows)
            ),
            rivals={
                "dequantized, then torch": lambda: functional.linear(rows, dequantize_triton(weight, DTYPE)),
                "torch in bfloat16": lambda: functional.linear(rows, dense),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRows(Work):
    kernels: ClassVar = ("quantize_rows",)
    does: ClassVar = "rows to e4m3, a scale a group"
    bytes_formula: ClassVar = "rows · (size · (e + 1) + 4 · groups)"

    num_rows: int
    size: int
    group_size: int

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows of {self.size:,}, groups of {self.group_size}"

    @property
    def least_capability(self) -> tuple[int, int]:
        return (8, 9)

    @property
    def floor(self) -> Floor:
        num_groups = -(-self.size // self.group_size)
        return Floor(num_bytes=self.num_rows * (self.size * (ELEMENT_BYTES + 1) + 4 * num_groups))

    def make(self, device: torch.device) -> Trial:
        rows = random_rows(self.num_rows, self.size, device=device)

        def meant(quantized: E4m3Rows) -> torch.Tensor:
            scales = quantized.scales.repeat_interleave(self.group_size, 1)[:, : self.size]
            return quantized.codes.float() * scales

        launch = partial(quantize_rows_triton, rows, self.group_size)
        return Trial(
            launch=launch,
            error=lambda: rms_ratio(meant(launch()), meant(quantize_rows_reference(rows, self.group_size))),
        )


def cases() -> Iterator[KernelCase]:
    for format in CodeFormat:
        for name, num_rows in (("1 row", 1), ("16 rows", 16), ("8k rows", 8192)):
            yield KernelCase(
                op="quantized_matmul",
                name=f"{format}, {name}",
                work=QuantizedMatmul(format=format, num_rows=num_rows, num_outputs=28672, num_inputs=4096),
                small=QuantizedMatmul(format=format, num_rows=3, num_outputs=40, num_inputs=130),
            )
    by_e4m3 = QuantizedMatmul(
        format=CodeFormat.E4M3, num_rows=8192, num_outputs=28672, num_inputs=4096, rounds_rows=True
    )
    small = QuantizedMatmul(
        format=CodeFormat.E4M3, num_rows=MIN_E4M3_ROWS, num_outputs=40, num_inputs=130, rounds_rows=True
    )
    yield KernelCase(op="quantized_matmul", name="e4m3 by e4m3, 8k rows", work=by_e4m3, small=small)
    yield KernelCase(
        op="quantize_rows",
        name="8k rows",
        work=QuantizeRows(num_rows=8192, size=4096, group_size=128),
        small=QuantizeRows(num_rows=3, size=70, group_size=32),
    )
