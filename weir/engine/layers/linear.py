"""A matrix with an optional bias, applied to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional

from weir.engine.weights import Weights

_MAX_FLIPPED_ROWS = 128
"""Up to so many rows the CPU's float32 product is faster with the weight on the left: 2.2 x for 8 to 32 rows of a head
of 49,152, 1.5 x for a gate and up projection of 3,072, never slower."""


class Linear:
    """`rows @ weight.T + bias`.

    Args:
        weight: [out_features, in_features].
        bias: [out_features].
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def load(cls, weights: Weights, name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False) -> Linear:
        """Take `name.weight` and, where the model has one, `name.bias`."""
        weight = weights.take(f"{name}.weight", num_outputs, num_inputs)
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
    ) -> Linear:
        """Take several projections of the same rows as one, so that they are read in one product."""
        part_weights = [f"{part}.weight" for part in parts]
        weight = weights.take_stacked(f"{name}.weight", part_weights, num_outputs, num_inputs)
        if not has_bias:
            return cls(weight)
        part_biases = [f"{part}.bias" for part in parts]
        return cls(weight, weights.take_stacked(f"{name}.bias", part_biases, num_outputs))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [num_rows, in_features] to [num_rows, out_features]."""
        if rows.device.type == "cpu" and rows.dtype == torch.float32 and 2 <= len(rows) <= _MAX_FLIPPED_ROWS:
            product = torch.mm(self.weight, rows.t()).t().contiguous()
            return product if self.bias is None else product.add_(self.bias)
        return functional.linear(rows, self.weight, self.bias)
