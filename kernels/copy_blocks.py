"""Copy whole blocks of the paged cache, all layers at once.

Shapes: cache [num_blocks, ...], block-major, so that one block is one contiguous slab; sources, destinations
[num_copies] int64, no destination twice, and no destination that is also a source. The cache is mutated.
"""

from __future__ import annotations

import torch


def copy_blocks_reference(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Plain torch."""
    cache[destinations] = cache[sources]


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy block `sources[i]` of `cache` onto block `destinations[i]`."""
    copy_blocks_reference(cache, sources, destinations)
