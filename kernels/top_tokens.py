"""The most likely tokens in an exact order: by value, and by lowest id where values are equal.

`torch.topk` leaves open which of several equal values it takes; here nothing depends on device, batch or library, since
no two keys are equal.
"""

from __future__ import annotations

import torch


def top_tokens(values: torch.Tensor, count: int) -> torch.Tensor:
    """Token ids [num_rows, count] int64, best first, of `values` [num_rows, vocab_size] float32, no NaN."""
    last = values.shape[1] - 1
    bits = (values + 0.0).view(torch.int32)  # adding makes one zero of both
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # as integers they have the order of the values now
    ids_left = torch.arange(last, -1, -1, device=values.device)
    keys = bits.long().bitwise_left_shift_(32).bitwise_or_(ids_left)
    return last - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
