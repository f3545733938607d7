"""The most likely tokens in an exact order: by value, and by lowest id where values are equal.

`torch.topk` leaves open which of several equal values it takes; here nothing depends on device, batch or library. Only
the part of a row that matters is sorted: of 49,152 tokens a stable sort takes some 3 ms a row, a threshold 0.1 ms.
"""

from __future__ import annotations

import torch


def find_kth_largest(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The value of each row's `counts`-th largest entry, [num_rows]; `counts` [num_rows] int64, 1 to vocab_size."""
    largest = torch.topk(values, int(counts.max()), dim=1).values
    return largest.gather(1, (counts - 1)[:, None])[:, 0]


def order_above(values: torch.Tensor, thresholds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the entries of every row that are at least the row's threshold.

    Args:
        values: [num_rows, vocab_size] floating point, no NaN.
        thresholds: [num_rows], none above its row's maximum.

    Returns:
        Values and token ids, both [num_rows, width], best first, padded with minus infinity and id 0.
    """
    # Ascending ids within each row: a stable sort by value then keeps the lowest id first.
    rows, token_ids = torch.nonzero(values >= thresholds[:, None], as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(values))
    starts = torch.cumsum(sizes, 0) - sizes
    columns = torch.arange(len(rows), device=values.device) - starts[rows]
    shape = (len(values), int(sizes.max()))
    packed = torch.full(shape, -torch.inf, dtype=values.dtype, device=values.device)
    packed_ids = torch.zeros(shape, dtype=torch.int64, device=values.device)
    packed[rows, columns] = values[rows, token_ids]
    packed_ids[rows, columns] = token_ids
    order = torch.sort(packed, dim=1, descending=True, stable=True)
    return order.values, packed_ids.gather(1, order.indices)
