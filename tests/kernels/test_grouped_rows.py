"""Rows sorted by group: each in one tile of its own group, in their order, and nothing written beyond."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.grouped_rows import CHUNK, group_rows


def members(groups: torch.Tensor, num_groups: int, tile_rows: int) -> list[list[int]]:
    """A group's rows as its tiles have them; checks the tiles on the way."""
    tiles = group_rows(groups, num_groups, tile_rows)
    found: list[list[int]] = [[] for _ in range(num_groups)]
    owners = tiles.tile_groups.tolist()
    used = [owner for owner in owners if owner >= 0]
    assert used == sorted(used)
    assert owners[len(used) :] == [-1] * (len(owners) - len(used))
    for owner, rows in zip(used, tiles.rows.tolist(), strict=False):
        filled = [row for row in rows if row >= 0]
        assert filled
        assert rows == filled + [-1] * (tile_rows - len(filled))
        assert len(found[owner]) % tile_rows == 0, "only a group's last tile is filled in part"
        found[owner] += filled
    return found


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize(
    ("num_rows", "num_groups"), [(1, 1), (1, 9), (7, 3), (63, 5), (65, 8), (700, 3), (2 * CHUNK + 5, 4)]
)
def test_each_row_is_in_its_group_s_tiles_in_order(num_rows: int, num_groups: int, tile_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    groups = torch.randint(-1, num_groups, (num_rows,), generator=generator, dtype=torch.int32)
    expected = [[row for row, group in enumerate(groups.tolist()) if group == number] for number in range(num_groups)]
    assert members(groups, num_groups, tile_rows) == expected


@pytest.mark.parametrize("group", [0, 2, 4])
def test_all_rows_of_one_group(group: int) -> None:
    found = members(torch.full((33,), group, dtype=torch.int32), 5, 16)
    assert found == [list(range(33)) if number == group else [] for number in range(5)]


def test_rows_of_no_group_are_in_no_tile() -> None:
    assert members(torch.full((20,), -1, dtype=torch.int32), 3, 16) == [[], [], []]


def test_the_most_tiles_there_can_be_fit() -> None:
    """One row over in every group but as many as there are rows."""
    groups = torch.tensor([0] * 17 + [1] * 17 + [2] * 17 + [3], dtype=torch.int32)
    assert len(group_rows(groups, 4, 16).tile_groups) == (52 + 4 * 15) // 16 == 7
    assert [len(rows) for rows in members(groups, 4, 16)] == [17, 17, 17, 1]
    assert len(group_rows(torch.empty(0, dtype=torch.int32), 4, 16).tile_groups) == 0
