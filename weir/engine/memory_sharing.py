"""How one process reads another's KV cache where it lies, without that one's help: what a way to do so has to offer.

`cuda_sharing` maps a GPU of the same host; `nixl_sharing` reads over whatever NIXL finds between two hosts.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import torch

from weir.engine.block_staging import StagedBlocks
from weir.engine.cuda_sharing import CudaSharing
from weir.engine.nixl_sharing import NixlSharing
from weir.engine.paged_kv_cache import PagedKvCache


class PeerMemory(Protocol):
    """A cache of another process, readable for as long as this lives.

    Attributes:
        size_bytes: of the cache.
        is_lost: a read has failed, and others will.
    """

    size_bytes: int
    is_lost: bool

    def read(self, offset: int, destination: torch.Tensor) -> Future[None]:
        """Start to copy the bytes from `offset` on into `destination`, and hold it until that is over; never blocks.

        Args:
            destination: [size] of uint8, of this engine's cache.

        Raises:
            UnavailableError: by the future: the peer cannot be read any more. Other errors are of this device.
        """
        ...


class MemorySharing(Protocol):
    """A way to read caches, for one engine.

    Attributes:
        domain: whose handles mean something here; equal on both sides.
    """

    domain: str

    def export(self) -> bytes:
        """A handle of this engine's cache for one peer; the cache outlives it.

        Raises:
            UnavailableError: there is none.
        """
        ...

    def map(self, handle: bytes) -> PeerMemory:
        """What a handle of the same domain names; may block.

        Raises:
            UnavailableError: it cannot be reached from here.
        """
        ...

    def close(self) -> None:
        """Nobody reads any more, on either side."""
        ...


def open_sharing(way: str, cache: PagedKvCache, copies: StagedBlocks) -> MemorySharing:
    """The way that `transfer_memory` names; may block. Raises ConfigError if it does not work here."""
    return CudaSharing(cache, copies) if way == "cuda_ipc" else NixlSharing(cache)
