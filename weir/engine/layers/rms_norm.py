"""RMS norm with its learned weight."""

from __future__ import annotations

from kernels.cpu.plan import AnyRows, AnyTensor
from kernels.rms_norm import rms_norm
from weir.engine.weights import Weights


class RmsNorm:
    """Normalises the last dimension, of `size` elements, and scales it by `name.weight`."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.take(f"{name}.weight", size)
        self._eps = eps

    def __call__(self, hidden: AnyRows, indices: AnyTensor | None = None) -> AnyRows:
        """All rows of `hidden`, or those that `indices` names."""
        return rms_norm(hidden, self._weight, self._eps, indices)
