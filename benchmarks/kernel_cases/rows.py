"""What is done to rows between the products, and the product of one tile shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as functional

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import ELEMENT_BYTES, KernelCase, Trial, Work, random_rows
from kernels.add_rms_norm import add_rms_norm_reference
from kernels.gelu_and_mul import gelu_and_mul_reference
from kernels.gpu.gate_and_mul import gate_and_mul_triton
from kernels.gpu.linear import linear_triton
from kernels.gpu.rms_norm import rms_norm_triton
from kernels.gpu.rotary_embedding import rotary_embedding_triton
from kernels.linear import linear_reference
from kernels.rms_norm import rms_norm_reference
from kernels.rotary_embedding import rotary_embedding_reference
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
class AddRmsNorm(Work):
    kernels: ClassVar = ("rms_norm",)
    does: ClassVar = "rows added to others in place, and the sum's norm"
    bytes_formula: ClassVar = "(4 · rows + 1) · size · e"

    num_rows: int
    size: int

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows of {self.size:,}"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=(4 * self.num_rows + 1) * self.size * ELEMENT_BYTES)

    def make(self, device: torch.device) -> Trial:
        rows, residual = (random_rows(self.num_rows, self.size, device=device) for _ in range(2))
        weight = random_rows(self.size, device=device)

        def changed(op: Callable[..., torch.Tensor]) -> torch.Tensor:
            """The norm, and the sum beside it."""
            added = residual.clone()
            return torch.cat((op(rows, added, weight), added), dim=1)

        def launch(rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return rms_norm_triton(rows, weight, 1e-5, residual=residual)

        return Trial(
            launch=partial(launch, rows, residual, weight),
            error=lambda: rms_ratio(changed(launch), changed(partial(add_rms_norm_reference, eps=1e-5))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateAndMul(Work):
    kernels: ClassVar = ("gate_and_mul",)
    does: ClassVar = "the gate of a feed-forward"
    bytes_formula: ClassVar = "3 · rows · size · e"

    activation: str
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
        plain = silu_and_mul_reference if self.activation == "silu" else gelu_and_mul_reference
        launch = partial(gate_and_mul_triton, gate_up, self.activation)
        return Trial(launch=launch, error=lambda: rms_ratio(launch(), plain(gate_up)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryEmbedding(Work):
    kernels: ClassVar = ("rotary_embedding",)
    does: ClassVar = "rotation of heads in place"
    bytes_formula: ClassVar = "tokens · (2 · heads · dim · e + 4 · dim)"

    num_tokens: int
    num_heads: int
    head_dim: int

    @property
    def shape(self) -> str:
        return f"{self.num_tokens:,} tokens, {self.num_heads} heads of {self.head_dim}"

    @property
    def floor(self) -> Floor:
        in_heads = 2 * self.num_heads * self.head_dim * ELEMENT_BYTES
        return Floor(num_bytes=self.num_tokens * (in_heads + 4 * self.head_dim))

    def make(self, device: torch.device) -> Trial:
        heads = random_rows(self.num_tokens, self.num_heads, self.head_dim, device=device)
        angles = torch.rand(self.num_tokens, self.head_dim // 2, device=device) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

        def turned(op: Callable[[torch.Tensor, torch.Tensor], None]) -> torch.Tensor:
            copy = heads.clone()
            op(copy, cos_sin)
            return copy

        return Trial(
            launch=partial(rotary_embedding_triton, heads, cos_sin),
            error=lambda: rms_ratio(turned(rotary_embedding_triton), turned(rotary_embedding_reference)),
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
            op="add_rms_norm",
            name=name,
            work=AddRmsNorm(num_rows=num_rows, size=4096),
            small=AddRmsNorm(num_rows=3, size=40),
        )
        for activation in ("silu", "gelu"):
            yield KernelCase(
                op=f"{activation}_and_mul",
                name=name,
                work=GateAndMul(activation=activation, num_rows=num_rows, size=14336),
                small=GateAndMul(activation=activation, num_rows=3, size=40),
            )
    yield KernelCase(
        op="rotary_embedding",
        name="8k tokens",
        work=RotaryEmbedding(num_tokens=8192, num_heads=32, head_dim=128),
        small=RotaryEmbedding(num_tokens=3, num_heads=2, head_dim=40),
    )
    for name, num_rows in (("64 rows", 64), ("8k rows", 8192)):
        yield KernelCase(
            op="linear",
            name=f"batch-invariant, {name}",
            work=InvariantLinear(num_rows=num_rows, num_outputs=4096, num_inputs=4096),
            small=InvariantLinear(num_rows=3, num_outputs=70, num_inputs=40),
        )
