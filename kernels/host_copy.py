"""Small tensors between the host and a device, without waiting for what the device is doing."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, on the CPU, as they are on `device`; on a GPU the copy is queued behind what is there already."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Values of a tensor on their way to the host: the copy is queued at once, so that it waits for nothing that is
    queued later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values

    def wait(self) -> torch.Tensor:
        """The values, on the CPU, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
