"""The memory of all KV blocks of one worker; who owns which block is the block pool's matter.

Block-major: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`. One block with all its layers is one
contiguous slab, so a transfer is a slice and not a gather. On a CPU the memory is one anonymous mapping: pages that
were never written cost nothing, and a block can be handed out as bytes without a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weir.core.errors import UnsupportedFeatureError
from weir.core.kv_layout import KvLayout
from weir.engine.huge_pages import prefer_huge_pages


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, each a strided view [num_blocks, num_kv_heads, block_size, width]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenRun:
    """Tokens that follow each other in a block of another worker and in one of ours."""

    block_id: int
    start: int
    source_start: int
    num_tokens: int


class PagedKvCache:
    """All blocks of one worker.

    Args:
        layout: sizes of one block.
        num_blocks: how many there are.
        device: where they live.

    Attributes:
        tensor: [num_blocks, num_layers, 2, num_kv_heads, block_size, width]; the width is head_dim, but for int8 as
            `kernels.eight_bit_heads` says.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        dtype: torch.dtype = getattr(torch, layout.kv_dtype)
        width = layout.head_bytes // dtype.itemsize
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, width)
        self._bytes: memoryview | None = None
        if device.type == "cpu":
            mapping = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            prefer_huge_pages(mapping)  # a head's tile is a page of 4 KiB, far from the next one
            self._bytes = memoryview(mapping)
            self.tensor = torch.frombuffer(self._bytes, dtype=dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [
            LayerCache(self.tensor[:, layer, 0], self.tensor[:, layer, 1]) for layer in range(layout.num_layers)
        ]

    def layer(self, index: int) -> LayerCache:
        """Keys and values of layer `index`; views, valid for the cache's life."""
        return self._layers[index]

    @property
    def is_in_host_memory(self) -> bool:
        """Whether blocks have a `block_view`."""
        return self._bytes is not None

    def block_bytes(self, block_id: int) -> torch.Tensor:
        """One block as [block_bytes] of uint8, wherever it is."""
        return self.tensor[block_id].view(-1).view(torch.uint8)

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block, writable, without a copy, valid for the cache's life.

        Raises:
            UnsupportedFeatureError: the cache is not in host memory.
        """
        if self._bytes is None:
            raise UnsupportedFeatureError(f"blocks on {self.tensor.device} have no view in host memory")
        size = self.layout.block_bytes
        return self._bytes[block_id * size : (block_id + 1) * size]

    def write_tokens(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
    ) -> None:
        """Write tokens out of one block of a worker whose block size is another.

        Args:
            block_ids: the sequence's block table here.
            first_token, num_tokens: positions to write, all within the source's block.
            payload: the source's whole block, [num_layers, 2, num_kv_heads, source_block_size, head_dim].
            source_block_size: tokens of a block there.
        """
        assert self._bytes is not None, "blocks on a device are not written from the host"
        slab = self._as_slabs(payload, source_block_size)[0]
        blocks = self._as_slabs(self._bytes, self.layout.block_size)
        for run in self._runs(block_ids, first_token, num_tokens, source_block_size):
            source = slab[:, run.source_start : run.source_start + run.num_tokens]
            blocks[run.block_id, :, run.start : run.start + run.num_tokens] = source

    def token_copies(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        payload: memoryview,
        source_block_size: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `write_tokens` would do, as sources and destinations, both strided, for whoever may wait for a device.

        Args:
            payload: writable, as torch wants it.
        """
        tiles, head_bytes = self._num_tiles, self.layout.head_bytes
        slab = torch.frombuffer(payload, dtype=torch.uint8).view(tiles, source_block_size, head_bytes)
        pairs = []
        for run in self._runs(block_ids, first_token, num_tokens, source_block_size):
            block = self.block_bytes(run.block_id).view(tiles, self.layout.block_size, head_bytes)
            source = slab[:, run.source_start : run.source_start + run.num_tokens]
            pairs.append((source, block[:, run.start : run.start + run.num_tokens]))
        return pairs

    def _runs(
        self, block_ids: Sequence[int], first_token: int, num_tokens: int, source_block_size: int
    ) -> Iterator[_TokenRun]:
        offset = first_token % source_block_size
        assert offset + num_tokens <= source_block_size, "the tokens are not all of one source block"
        token, end = first_token, first_token + num_tokens
        while token < end:
            index, start = divmod(token, self.layout.block_size)
            count = min(self.layout.block_size - start, end - token)
            yield _TokenRun(block_id=block_ids[index], start=start, source_start=offset, num_tokens=count)
            token, offset = token + count, offset + count

    @property
    def _num_tiles(self) -> int:
        return self.layout.num_layers * 2 * self.layout.num_kv_heads

    def _as_slabs(self, raw: memoryview, block_size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Bytes of whole blocks as [num_blocks, layers and K or V and heads, block_size, bytes of a head]."""
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, self._num_tiles, block_size, self.layout.head_bytes)
