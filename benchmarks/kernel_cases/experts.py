"""Rows that meet different matrices: mixtures of experts, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import ELEMENT_BYTES, KernelCase, Trial, Work, random_rows
from kernels.gpu.lora_matmul import lora_matmul_triton
from kernels.gpu.moe import moe_triton
from kernels.lora_matmul import lora_matmul_reference
from kernels.moe import moe_reference
from tests.kernels.paged_pool import rms_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe(Work):
    """Tokens take turns with the experts, so that as many as possible are met and all equally often."""

    kernels: ClassVar = ("moe", "grouped_rows")
    does: ClassVar = "each token through its best experts, added by their weights"
    bytes_formula: ClassVar = (
        "(3 · min(experts, tokens · k) · hidden · size + 2 · tokens · hidden + tokens · experts) · e"
    )
    flops_formula: ClassVar = "6 · tokens · k · hidden · size"

    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int
    size: int

    @property
    def shape(self) -> str:
        return (
            f"{self.num_tokens:,} tokens, {self.top_k} of {self.num_experts} experts, "
            f"{self.hidden_size:,} to {self.size:,}"
        )

    @property
    def floor(self) -> Floor:
        num_met = min(self.num_experts, self.num_tokens * self.top_k)
        in_experts = 3 * num_met * self.hidden_size * self.size
        in_rows = self.num_tokens * (2 * self.hidden_size + self.num_experts)
        return Floor(
            num_bytes=(in_experts + in_rows) * ELEMENT_BYTES,
            flops=6 * self.num_tokens * self.top_k * self.hidden_size * self.size,
        )

    def make(self, device: torch.device) -> Trial:
        hidden = random_rows(self.num_tokens, self.hidden_size, device=device)
        turns = torch.arange(self.num_tokens * self.top_k, device=device) % self.num_experts
        logits = torch.zeros(self.num_tokens, self.num_experts, device=device)
        scores = 8 + torch.rand(self.num_tokens, self.top_k, device=device)
        logits = logits.scatter_(1, turns.view(self.num_tokens, self.top_k), scores).to(hidden.dtype)
        gate_up = random_rows(
            self.num_experts, 2 * self.size, self.hidden_size, device=device, scale=self.hidden_size**-0.5
        )
        down = random_rows(self.num_experts, self.hidden_size, self.size, device=device, scale=self.size**-0.5)
        arguments = (hidden, logits, gate_up, down)
        top_k = self.top_k
        return Trial(
            launch=lambda: moe_triton(*arguments, top_k=top_k, is_renormalised=True),
            error=lambda: rms_ratio(
                moe_triton(*arguments, top_k=top_k, is_renormalised=True),
                moe_reference(*arguments, top_k=top_k, is_renormalised=True),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraMatmul(Work):
    """Tokens take turns with the adapters and with having none."""

    kernels: ClassVar = ("lora_matmul", "grouped_rows")
    does: ClassVar = "adds each token's own adapter to a projection in place"
    bytes_formula: ClassVar = (
        "min(adapters, adapted tokens) · rank · (inputs + outputs) · e + adapted tokens · (inputs + 2 · outputs) · e"
    )
    flops_formula: ClassVar = "2 · adapted tokens · rank · (inputs + outputs)"

    num_tokens: int
    num_adapters: int
    rank: int
    num_inputs: int
    num_outputs: int

    @property
    def shape(self) -> str:
        return (
            f"{self.num_tokens:,} tokens, {self.num_adapters} adapters of rank {self.rank} and none, "
            f"{self.num_inputs:,} to {self.num_outputs:,}"
        )

    @property
    def floor(self) -> Floor:
        num_adapted = self.num_tokens - -(-self.num_tokens // (self.num_adapters + 1))
        in_adapters = min(self.num_adapters, num_adapted) * self.rank * (self.num_inputs + self.num_outputs)
        in_rows = num_adapted * (self.num_inputs + 2 * self.num_outputs)
        return Floor(
            num_bytes=(in_adapters + in_rows) * ELEMENT_BYTES,
            flops=2 * num_adapted * self.rank * (self.num_inputs + self.num_outputs),
        )

    def make(self, device: torch.device) -> Trial:
        rows = random_rows(self.num_tokens, self.num_inputs, device=device)
        output = random_rows(self.num_tokens, self.num_outputs, device=device)
        lora_a = random_rows(self.num_adapters, self.rank, self.num_inputs, device=device, scale=self.num_inputs**-0.5)
        lora_b = random_rows(self.num_adapters, self.num_outputs, self.rank, device=device, scale=self.rank**-0.5)
        adapter_ids = torch.arange(self.num_tokens, dtype=torch.int32, device=device) % (self.num_adapters + 1) - 1
        scalings = torch.rand(self.num_adapters, device=device) + 0.5
        arguments = (rows, lora_a, lora_b, adapter_ids, scalings)
        return Trial(
            launch=partial(lora_matmul_triton, output, *arguments),
            error=lambda: rms_ratio(
                lora_matmul_triton(output.clone(), *arguments), lora_matmul_reference(output.clone(), *arguments)
            ),
        )


def cases() -> Iterator[KernelCase]:
    small = Moe(num_tokens=3, num_experts=4, top_k=2, hidden_size=40, size=24)
    for name, num_tokens in (("1 token", 1), ("64 tokens", 64), ("8k tokens", 8192)):
        work = Moe(num_tokens=num_tokens, num_experts=128, top_k=8, hidden_size=2048, size=768)
        yield KernelCase(op="moe", name=f"Qwen3-30B-A3B, {name}", work=work, small=small)
    adapters = LoraMatmul(num_tokens=5, num_adapters=2, rank=8, num_inputs=40, num_outputs=24)
    for name, num_tokens in (("64 tokens", 64), ("8k tokens", 8192)):
        lora = LoraMatmul(num_tokens=num_tokens, num_adapters=8, rank=16, num_inputs=4096, num_outputs=4096)
        yield KernelCase(op="lora_matmul", name=name, work=lora, small=adapters)
