"""A cache on a GPU as other processes of the same host map it: CUDA IPC. Bytes in, bytes out; it copies nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weir.core.errors import UnavailableError
from weir.engine.paged_kv_cache import PagedKvCache

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """A cache of another process; mapped for as long as this lives.

    Attributes:
        tensor: [size_bytes] of uint8.
    """

    tensor: torch.Tensor

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel()


class MemorySharing(Protocol):
    """A way to map one process's cache into another."""

    @property
    def domain(self) -> str:
        """Whose handles can be mapped here; equal on both sides."""
        ...

    def export(self, cache: PagedKvCache) -> bytes:
        """A handle for one process to map; the cache outlives it.

        Raises:
            UnavailableError: there is none.
        """
        ...

    def map(self, handle: bytes) -> MappedMemory:
        """Map what a handle of the same domain names; may block.

        Raises:
            UnavailableError: it cannot be mapped here.
        """
        ...


class CudaSharing:
    """A `MemorySharing` between processes that see the same GPU, or GPUs that reach each other.

    A handle is what torch itself sends between processes, as JSON: it comes from a peer, so it is never unpickled.
    """

    def __init__(self, device: torch.device) -> None:
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        self._device = device
        self.domain = f"cuda-ipc/{boot_id}/torch-{torch.__version__}" if boot_id else ""

    def export(self, cache: PagedKvCache) -> bytes:
        """See MemorySharing."""
        try:
            _, *parts = cache.tensor.untyped_storage()._share_cuda_()
        except RuntimeError as exc:
            raise UnavailableError(f"CUDA gives no handle: {exc}") from exc
        return json.dumps(
            {
                "gpu": _uuid(self._device.index or 0),
                "size_bytes": cache.tensor.nbytes,
                "parts": [part.hex() if isinstance(part, bytes) else part for part in parts],
            }
        ).encode()

    def map(self, handle: bytes) -> MappedMemory:
        """See MemorySharing."""
        try:
            fields: dict[str, Any] = json.loads(handle)
            gpus = [index for index in range(torch.cuda.device_count()) if _uuid(index) == fields["gpu"]]
            memory, storage_bytes, offset, counter, counter_offset, event, has_event = fields["parts"]
            if not gpus:
                raise UnavailableError(f"the GPU {fields['gpu']} is not visible to this process")
            tensor = rebuild_cuda_tensor(
                torch.Tensor,
                (fields["size_bytes"],),
                (1,),
                0,
                torch.UntypedStorage,
                torch.uint8,
                gpus[0],
                bytes.fromhex(memory),
                storage_bytes,
                offset,
                False,
                bytes.fromhex(counter),
                counter_offset,
                bytes.fromhex(event),
                has_event,
            )
        except (ValueError, KeyError, TypeError, RuntimeError) as exc:
            raise UnavailableError(f"the handle of a peer's KV memory: {exc}") from exc
        return MappedMemory(tensor)


def _uuid(device_index: int) -> str:
    return str(torch.cuda.get_device_properties(device_index).uuid)
