"""What is done to rows between the products, and the product of one tile shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as functional

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import ELEMENT_BYTES, KernelCase, Trial, Work, random_rows
from kernels.gpu.linear import linear_triton
from kernels.gpu.rms_norm import rms_norm_triton
from kernels.gpu.silu_and_mul import silu_and_mul_triton
from kernels.linear import linear_reference
from kernels.rms_norm import rms_norm_reference
from kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.paged_pool import rms_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm(Work):
    kernels: ClassVar = ("rms_norm",)
    does: ClassVar = "root-mean-square norm of rows"
    bytes_formula: ClassVar = "(2 · rows + 1) · size · e"

    num_rows: int
    size: int

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows of {self.size:,}"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=(2 * self.num_rows + 1) * self.size * ELEMENT_BYTES)

    def make(self, device: torch.device) -> Trial:
        hidden, weight = random_rows(self.num_rows, self.size, device=device), random_rows(self.size, device=device)
        return Trial(
            launch=lambda: rms_norm_triton(hidden, weight, 1e-5),
            error=lambda: rms_ratio(rms_norm_triton(hidden, weight, 1e-5), rms_norm_reference(hidden, weight, 1e-5)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiluAndMul(Work):
    kernels: ClassVar = ("silu_and_mul",)
    does: ClassVar = "the gate of a feed-forward"
    bytes_formula: ClassVar = "3 · rows · size · e"

    num_rows: int
    size: int

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows of twice {self.size:,}"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=3 * self.num_rows * self.size * ELEMENT_BYTES)

    def make(self, device: torch.device) -> Trial:
        gate_up = random_rows(self.num_rows, 2 * self.size, device=device)
        return Trial(
            launch=lambda: silu_and_mul_triton(gate_up),
            error=lambda: rms_ratio(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InvariantLinear(Work):
    kernels: ClassVar = ("linear",)
    does: ClassVar = "product by one tile shape, so that a row gets the same in any batch"
    bytes_formula: ClassVar = "(outputs · inputs + rows · (inputs + outputs)) · e"
    flops_formula: ClassVar = "2 · rows · outputs · inputs"

    num_rows: int
    num_outputs: int
    num_inputs: int

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows, {self.num_inputs:,} to {self.num_outputs:,}"

    @property
    def floor(self) -> Floor:
        products = self.num_outputs * self.num_inputs
        elements = products + self.num_rows * (self.num_inputs + self.num_outputs)
        return Floor(num_bytes=elements * ELEMENT_BYTES, flops=2 * self.num_rows * products)

    def make(self, device: torch.device) -> Trial:
        rows = random_rows(self.num_rows, self.num_inputs, device=device)
        weight = random_rows(self.num_outputs, self.num_inputs, device=device, scale=self.num_inputs**-0.5)
        return Trial(
            launch=lambda: linear_triton(rows, weight),
            error=lambda: rms_ratio(linear_triton(rows, weight), linear_reference(rows.float(), weight.float())),
            rivals={"torch": lambda: functional.linear(rows, weight)},
        )


def cases() -> Iterator[KernelCase]:
    for name, num_rows in (("8k rows", 8192), ("64 rows", 64)):
        yield KernelCase(
            op="rms_norm",
            name=name,
            work=RmsNorm(num_rows=num_rows, size=4096),
            small=RmsNorm(num_rows=3, size=40),
        )
        yield KernelCase(
            op="silu_and_mul",
            name=name,
            work=SiluAndMul(num_rows=num_rows, size=14336),
            small=SiluAndMul(num_rows=3, size=40),
        )
    for name, num_rows in (("64 rows", 64), ("8k rows", 8192)):
        yield KernelCase(
            op="linear",
            name=f"batch-invariant, {name}",
            work=InvariantLinear(num_rows=num_rows, num_outputs=4096, num_inputs=4096),
            small=InvariantLinear(num_rows=3, num_outputs=70, num_inputs=40),
        )
