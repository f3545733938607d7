"""Rows of a matrix by token id.

Shapes: token_ids [num_tokens] int64; weight [vocab_size, size]; the result is [num_tokens, size].
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernels.cpu.packed_matrix import PackedMatrix
from kernels.cpu.plan import AnyRows, AnyTensor, PlannedRows, PlannedTensor
from kernels.cpu.structs import Kind
from kernels.linear import AnyMatrix, InvariantMatrix
from kernels.quantized_matrix import QuantizedMatrix


def embedding_reference(token_ids: torch.Tensor, weight: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Plain torch."""
    if isinstance(weight, QuantizedMatrix):
        return weight.unpacked(token_ids).dequantized().to(weight.dtype)
    return functional.embedding(token_ids, weight)


def embedding_cpu(token_ids: PlannedTensor, weight: PackedMatrix) -> PlannedRows:
    """Planned: `unpack_row` in `kernels/cpu/pack.h`; the ids are a step's."""
    return token_ids.plan.add(Kind.EMBEDDING, token_ids.plan.rows(weight.num_inputs), matrix=weight)


def embedding(token_ids: AnyTensor, weight: AnyMatrix) -> AnyRows:
    """The rows `token_ids` of `weight`; the caller owns the result."""
    if isinstance(token_ids, PlannedTensor):
        assert isinstance(weight, PackedMatrix)
        return embedding_cpu(token_ids, weight)
    assert not isinstance(weight, PackedMatrix)
    if isinstance(weight, InvariantMatrix):
        weight = weight.tensor
    return embedding_reference(token_ids, weight)
