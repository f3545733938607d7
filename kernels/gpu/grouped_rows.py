"""Rows sorted by the group whose matrix they meet, and their product with it: what `moe` and `lora_matmul` share.

A tile is some rows of one group; a group's rows fill tiles in their order, the last in part. How many tiles there are
follows from the groups of the rows, which only the device knows, so grids are made for the most there can be, and
programs of tiles that are left over end at once. Nothing depends on the order in which programs run.
Source: Gale et al. 2022, MegaBlocks, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import dot

CHUNK = 1024
"""Groups of rows that a program reads at a time."""
BAND = 8
"""Tiles that pass over the same columns one after the other, so that a matrix is read once for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """What a program multiplies.

    Attributes:
        rows: of one group; powers of two, at least the 16 of a tensor core, as are the others.
        outputs: rows of its matrix.
        row_bytes: of each row at a time.
    """

    rows: int
    outputs: int
    row_bytes: int
    num_warps: int
    num_stages: int

    def constants(self, element_bytes: int) -> dict[str, int]:
        return {"M": self.rows, "N": self.outputs, "K": self.row_bytes // element_bytes, "BAND": BAND}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def choose_shape(shapes: Sequence[TileShape], num_rows: int, num_groups: int) -> TileShape:
    """The smallest whose tile holds what a group has on average, or the largest: no more than the host knows."""
    return next((shape for shape in shapes if num_rows <= shape.rows * num_groups), shapes[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Which rows are in which tile.

    Attributes:
        rows: [num_tiles, tile_rows] int32, numbers of rows, -1 after a group's last; undefined in tiles left over.
        tile_groups: [num_tiles] int32, whose tile it is; -1 of one left over.
    """

    rows: torch.Tensor
    tile_groups: torch.Tensor

    @property
    def num_tiles(self) -> int:
        return self.rows.shape[0]

    @property
    def tile_rows(self) -> int:
        return self.rows.shape[1]


@triton.jit
def _group_rows_kernel(
    groups_ptr,
    rows_ptr,
    tile_groups_ptr,
    num_rows,
    num_tiles,
    NUM_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    G: tl.constexpr,
):
    """One group: counts all, so as to know where its own tiles begin, then puts its rows there."""
    group = tl.program_id(0)
    numbers, within = tl.arange(0, G), tl.arange(0, CHUNK)
    counts = tl.zeros([G], tl.int32)
    for start in range(0, num_rows, CHUNK):
        groups = tl.load(groups_ptr + start + within, mask=start + within < num_rows, other=-1)
        counts += tl.histogram(groups, G, mask=(groups >= 0) & (groups < NUM_GROUPS))
    tiles = tl.cdiv(counts, TILE_ROWS)
    first = tl.sum(tl.where(numbers < group, tiles, 0), 0)
    count = tl.sum(tl.where(numbers == group, counts, 0), 0)
    end = first + tl.cdiv(count, TILE_ROWS)

    last_written = num_tiles if group == NUM_GROUPS - 1 else end
    for start in range(first, last_written, CHUNK):
        tile = start + within
        tl.store(tile_groups_ptr + tile, tl.where(tile < end, group, -1), mask=tile < last_written)

    place_ptr = rows_ptr + first.to(tl.int64) * TILE_ROWS
    num_placed = 0
    for start in range(0, num_rows, CHUNK):
        groups = tl.load(groups_ptr + start + within, mask=start + within < num_rows, other=-1)
        is_own = groups == group
        places = num_placed + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(place_ptr + places, start + within, mask=is_own)
        num_placed += tl.sum(is_own.to(tl.int32), 0)
    rest = count + tl.arange(0, TILE_ROWS)
    tl.store(place_ptr + rest, rest * 0 - 1, mask=rest < (end - first) * TILE_ROWS)


def group_rows(groups: torch.Tensor, num_groups: int, tile_rows: int) -> RowGroups:
    """Sort rows by `groups` [num_rows] int32; a row whose group is negative is in no tile.

    Args:
        tile_rows: a power of two.
    """
    num_rows = len(groups)
    assert groups.dtype == torch.int32
    assert groups.is_contiguous()
    num_used = min(num_rows, num_groups)
    num_tiles = (num_rows + num_used * (tile_rows - 1)) // tile_rows
    rows = torch.empty((num_tiles, tile_rows), dtype=torch.int32, device=groups.device)
    tile_groups = torch.empty(num_tiles, dtype=torch.int32, device=groups.device)
    if num_tiles:
        _group_rows_kernel[num_groups,](
            groups,
            rows,
            tile_groups,
            num_rows,
            num_tiles,
            NUM_GROUPS=num_groups,
            TILE_ROWS=tile_rows,
            CHUNK=CHUNK,
            G=triton.next_power_of_2(num_groups),
        )
    return RowGroups(rows=rows, tile_groups=tile_groups)


@triton.jit
def tile_and_block(program, num_tiles, num_blocks, BAND: tl.constexpr):
    """Which tile and which block of columns a program has: band by band of tiles, and in it tile after tile."""
    first = program // (BAND * num_blocks) * BAND
    height = tl.minimum(num_tiles - first, BAND)
    within = program - first * num_blocks
    return first + within % height, within // height


@triton.jit
def gathered_product(
    row_ptrs,
    is_row,
    weight_ptrs,
    is_output,
    start,
    end,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Rows times the rows of a matrix, [M, N] float32, over their elements from `start` to `end`.

    Args:
        row_ptrs, weight_ptrs: [M] and [N], where each begins.
        is_row, is_output: [M] and [N], those that are read.
    """
    steps = tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for position in range(start, end, K):
        places = position + steps
        is_there = places < end
        rows = tl.load(row_ptrs[:, None] + places[None, :], mask=is_row[:, None] & is_there[None, :], other=0.0)
        weights = tl.load(
            weight_ptrs[None, :] + places[:, None], mask=is_there[:, None] & is_output[None, :], other=0.0
        )
        total += dot(rows, weights)
    return total
