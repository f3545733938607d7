"""A cache on a GPU as other processes of the same host map it: CUDA IPC."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weir.core.errors import UnavailableError
from weir.engine.block_staging import StagedBlocks
from weir.engine.paged_kv_cache import PagedKvCache

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MappedMemory:
    """A `PeerMemory` that is mapped here: reading is a copy like any other.

    Args:
        tensor: [size_bytes] of uint8.
        copies: makes the copies.
    """

    def __init__(self, tensor: torch.Tensor, copies: StagedBlocks) -> None:
        self.is_lost = False
        self.tensor = tensor
        self.size_bytes = tensor.numel()
        self._copies = copies

    def read(self, offset: int, destination: torch.Tensor) -> Future[None]:
        """See PeerMemory."""
        source = self.tensor[offset : offset + len(destination)]
        return self._copies.submit(lambda: self._copies.copy([(source, destination)]))


class CudaSharing:
    """A `MemorySharing` between processes that see the same GPU, or GPUs that reach each other.

    A handle is what torch itself sends between processes, as JSON: it comes from a peer, so it is never unpickled.
    """

    def __init__(self, cache: PagedKvCache, copies: StagedBlocks) -> None:
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        self._cache = cache
        self._copies = copies
        self.domain = f"cuda-ipc/{boot_id}/torch-{torch.__version__}" if boot_id else ""

    def export(self) -> bytes:
        """See MemorySharing."""
        tensor = self._cache.tensor
        try:
            _, *parts = tensor.untyped_storage()._share_cuda_()
        except RuntimeError as exc:
            raise UnavailableError(f"CUDA gives no handle: {exc}") from exc
        return json.dumps(
            {
                "gpu": _uuid(tensor.device.index or 0),
                "size_bytes": tensor.nbytes,
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
        return MappedMemory(tensor, self._copies)

    def close(self) -> None:
        """See MemorySharing; mappings end with what was mapped."""


def _uuid(device_index: int) -> str:
    return str(torch.cuda.get_device_properties(device_index).uuid)
