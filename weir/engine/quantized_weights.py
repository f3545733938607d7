"""The matrices of a model as a GPU multiplies rows by them: those of a quantised checkpoint in their own codes, those
of another in the bits that are asked for.
"""

from __future__ import annotations

import torch

from kernels.linear import AnyMatrix
from kernels.quantized_matrix import CodeFormat, QuantizedMatrix, QuantizedRows, can_stack
from weir.engine.quantized_checkpoint import QuantizedCheckpoint
from weir.engine.weights import TakenTensor, TensorSource

_LAYERS = "model.layers."
"""Four bits are for matrices of layers: embedding and head have a row for each token, and take eight."""


class QuantizedWeights:
    """Gives matrices by name; see `weights.Weights`.

    Args:
        source: the checkpoint.
        quantization: one of `config.QUANTIZATIONS`; a quantised checkpoint keeps its bits, unless it is none.
        dtype: of rows, and of matrices that are not quantised.
        device: where they go.
    """

    def __init__(self, source: TensorSource, quantization: str, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._format = CodeFormat(quantization) if quantization in ("int8", "int4") else None
        self._checkpoint = source if quantization != "none" and isinstance(source, QuantizedCheckpoint) else None
        self._dtype = dtype
        self._device = device

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix may be one of codes."""
        return self._format is not None or self._checkpoint is not None

    def __call__(self, taken: TakenTensor) -> AnyMatrix:
        if self._checkpoint is not None:
            found = [self._checkpoint.quantized(part, self._device) for part in taken.parts]
            parts = [part for part in found if part is not None]
            if len(parts) == len(found) and can_stack(parts):
                quantizes_rows = self._checkpoint.packing.quantizes_rows
                return QuantizedMatrix.pack(parts, self._dtype, quantizes_rows=quantizes_rows)
        floats = torch.cat([self._source.read(part).to(self._device, self._dtype) for part in taken.parts])
        if self._format is None or self._checkpoint is not None:
            return floats
        format = self._format if taken.name.startswith(_LAYERS) else CodeFormat.INT8
        return QuantizedMatrix.pack([QuantizedRows.of_floats(floats, format)], self._dtype)
