"""What low-rank adapters add to a projection, in a batch whose rows have different ones, or none.

Shapes: rows [num_tokens, num_inputs]; adapter_ids [num_tokens] int32, negative for none; lora_a
[num_adapters, num_slices * rank, num_inputs]; lora_b [num_adapters, num_outputs, rank]; scalings [num_adapters]
float32; output [num_tokens, num_outputs], the base product. A stacked projection has `slice_sizes`, whose sum is
num_outputs: slice s has rows `s * rank` to `(s + 1) * rank` of its adapter's A. An adapter of a smaller rank, or
without a slice, has zeros there. The low-rank rows are rounded to B's dtype, as a product of its own would be.
Source: Hu et al. 2021, LoRA, section 4.1; Chen et al. 2023, Punica, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional


def lora_matmul_reference(
    output: torch.Tensor,
    rows: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    adapter_ids: torch.Tensor,
    scalings: torch.Tensor,
    slice_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Plain torch, float32 inside, one adapter after the other."""
    rank = lora_b.shape[2]
    sizes = [lora_b.shape[1]] if slice_sizes is None else list(slice_sizes)
    for adapter in adapter_ids.unique().tolist():
        if adapter < 0:
            continue
        tokens = (adapter_ids == adapter).nonzero()[:, 0]
        shrunk = functional.linear(rows[tokens].float(), lora_a[adapter].float()).to(lora_b.dtype).float()
        parts = zip(shrunk.split(rank, 1), lora_b[adapter].float().split(sizes), strict=True)
        added = torch.cat([functional.linear(part, weight) for part, weight in parts], 1)
        output[tokens] = (output[tokens].float() + added * scalings[adapter]).to(output.dtype)
    return output


def lora_matmul(
    output: torch.Tensor,
    rows: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    adapter_ids: torch.Tensor,
    scalings: torch.Tensor,
    slice_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Add `rows @ A.T @ B.T * scaling` of each row's own adapter to `output` in place; returns `output`."""
    if output.is_cuda:
        from kernels.gpu.lora_matmul import lora_matmul_triton

        return lora_matmul_triton(output, rows, lora_a, lora_b, adapter_ids, scalings, slice_sizes)
    return lora_matmul_reference(output, rows, lora_a, lora_b, adapter_ids, scalings, slice_sizes)
