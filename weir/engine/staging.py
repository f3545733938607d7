"""Brings the arrays of a step to its device in one copy, from pinned memory, without waiting for anything.

Knows neither what the arrays mean nor who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 16
"""Of every array: kernels are compiled for pointers that are multiples of 16, and for others once more."""

_NUM_BUFFERS = 3
"""One is filled while copies out of the others are under way."""


class Staging:
    """Buffers in host memory, used in turn.

    Args:
        device: where the arrays go. On a CPU nothing is pinned, and the copies are plain ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * _NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0

    def send(self, arrays: Sequence[np.ndarray[Any, Any]], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Copy `arrays`, at least one, to the device: tensors of their shapes and dtypes, one behind the other.

        Args:
            into: device memory for them [bytes] uint8; else it is new. The same shapes lie at the same places in it.
        """
        offsets = _offsets(arrays)
        buffer = self._next_buffer(offsets[-1])
        for array, start in zip(arrays, offsets, strict=False):
            buffer.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        sent = torch.empty(offsets[-1], dtype=torch.uint8, device=self._device) if into is None else into[: offsets[-1]]
        sent.copy_(buffer, non_blocking=True)
        if self._device.type == "cuda":
            self._copied[self._turn] = torch.cuda.current_stream(self._device).record_event()
        return [
            sent[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for array, start in zip(arrays, offsets, strict=False)
        ]

    def _next_buffer(self, num_bytes: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # two steps ago: over long since
        if len(self._buffers[self._turn]) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return self._buffers[self._turn][:num_bytes]


def _offsets(arrays: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    """Where each array begins, and at the end how many bytes all take."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets
