"""A device without a device: a cache that the host cannot see, and copies of it that end when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch

from weir.core.errors import UnavailableError
from weir.engine.block_copies import BlockCopies, BlockCopy
from weir.engine.block_staging import StagedBlocks
from weir.engine.cuda_sharing import MappedMemory
from weir.engine.paged_kv_cache import LayerCache, PagedKvCache


def hide_from_host(cache: PagedKvCache, file: Path | None = None) -> PagedKvCache:
    """The same cache, without views of its blocks in host memory.

    Args:
        file: where it is kept from now on, so that another process can map it.
    """
    cache._bytes = None
    if file is not None:
        raw = torch.from_file(str(file), shared=True, size=cache.tensor.nbytes, dtype=torch.uint8)
        kept = raw.view(cache.tensor.dtype).view(cache.tensor.shape)
        kept.copy_(cache.tensor)
        cache.tensor = kept
        cache._layers = [LayerCache(kept[:, layer, 0], kept[:, layer, 1]) for layer in range(len(cache._layers))]
    return cache


class FileSharing:
    """A `MemorySharing` of caches that are kept in files; opened by the engine it is given to.

    Attributes:
        failure: what `map` raises, and then every read ends with.
        num_mapped: mappings made.
    """

    domain = "files"

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failure: UnavailableError | None = None
        self.num_mapped = 0

    def open(self, way: str, cache: PagedKvCache, copies: StagedBlocks) -> FileSharing:
        self._copies = copies
        return self

    def export(self) -> bytes:
        return str(self.file).encode()

    def map(self, handle: bytes) -> MappedMemory:
        if self.failure is not None:
            raise self.failure
        self.num_mapped += 1
        file = Path(handle.decode())
        mapped = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)
        return FileMemory(self, mapped, self._copies)

    def close(self) -> None:
        pass


class FileMemory(MappedMemory):
    """A `PeerMemory` that can be lost."""

    def __init__(self, sharing: FileSharing, mapped: torch.Tensor, copies: StagedBlocks) -> None:
        super().__init__(mapped, copies)
        self._sharing = sharing

    def read(self, offset: int, destination: torch.Tensor) -> Future[None]:
        if self._sharing.failure is None:
            return super().read(offset, destination)
        self.is_lost = True
        over: Future[None] = Future()
        over.set_exception(self._sharing.failure)
        return over


class HeldCopies(BlockCopies):
    """Copies run freely until `hold`; then each needs an `allow`. Bytes move at the very end of a copy, not before.

    Attributes:
        num_started, num_ended: copies so far.
        failure: what a copy raises instead of moving bytes.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.num_started = 0
        self.num_ended = 0
        self.failure: Exception | None = None
        self._changed = threading.Condition()
        self._is_held = False
        self._num_allowed = 0

    def hold(self) -> None:
        with self._changed:
            self._is_held = True
            self._num_allowed = 0

    def allow(self, num_copies: int = 1) -> None:
        with self._changed:
            self._num_allowed += num_copies
            self._changed.notify_all()

    def run_freely(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> BlockCopy:
        with self._changed:
            self.num_started += 1
        return _HeldCopy(self, list(pairs))

    def end(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In the thread that waits for a copy."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held or self._num_allowed > 0)
            self._num_allowed -= 1
            if self.failure is not None:
                raise self.failure
            for source, destination in pairs:
                destination.copy_(source)
            self.num_ended += 1


class _HeldCopy(BlockCopy):
    def __init__(self, copies: HeldCopies, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(None)
        self._copies = copies
        self._pairs = pairs

    def wait(self) -> None:
        self._copies.end(self._pairs)
