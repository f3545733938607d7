"""A matrix with an optional bias, applied to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.plan import AnyRows
from kernels.linear import AnyMatrix, InvariantMatrix, linear
from weir.engine.weights import Weights


class Linear:
    """`rows @ weight.T + bias`, gated where it is.

    Args:
        weight: [num_outputs, num_inputs].
        bias: [num_outputs].
        is_gated: the first half of the outputs gates the second.
    """

    def __init__(self, weight: AnyMatrix, bias: torch.Tensor | None = None, *, is_gated: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self._is_gated = is_gated

    @property
    def is_batch_invariant(self) -> bool:
        """A row's result does not depend on the rows beside it."""
        return isinstance(self.weight, InvariantMatrix)

    @classmethod
    def load(cls, weights: Weights, name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False) -> Linear:
        """Take `name.weight` and, where the model has one, `name.bias`."""
        weight = weights.take_matrix(f"{name}.weight", num_outputs, num_inputs)
        return cls(weight, weights.take(f"{name}.bias", num_outputs) if has_bias else None)

    @classmethod
    def load_stacked(
        cls,
        weights: Weights,
        name: str,
        parts: Sequence[str],
        num_outputs: Sequence[int],
        num_inputs: int,
        *,
        has_bias: bool = False,
        is_gated: bool = False,
    ) -> Linear:
        """Take several projections of the same rows as one, so that they are read in one product."""
        part_weights = [f"{part}.weight" for part in parts]
        weight = weights.take_stacked_matrix(f"{name}.weight", part_weights, num_outputs, num_inputs, is_gated=is_gated)
        part_biases = [f"{part}.bias" for part in parts]
        bias = weights.take_stacked(f"{name}.bias", part_biases, num_outputs) if has_bias else None
        return cls(weight, bias, is_gated=is_gated)

    def __call__(self, rows: AnyRows, residual: AnyRows | None = None) -> AnyRows:
        """Rows [num_rows, num_inputs] to [num_rows, num_outputs], half as many where gated; plus `residual`."""
        return linear(rows, self.weight, self.bias, residual, is_gated=self._is_gated)
