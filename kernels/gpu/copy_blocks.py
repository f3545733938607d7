"""See `kernels.copy_blocks`: one kernel copies rows of bytes by the numbers they have on either side. A program takes a
piece of a row, in the widest words that rows and addresses are multiples of; with the size of a row known when it is
compiled, a thread moves 16 bytes at a time where 16 divides that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE_BYTES = 8192
OPTIONS = {"num_warps": 4}
"""Four words of 16 bytes a thread."""


@triton.jit
def _copy_rows_kernel(source_ptr, sources_ptr, target_ptr, targets_ptr, NUM_WORDS: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = row if sources_ptr is None else tl.load(sources_ptr + row)
    target = row if targets_ptr is None else tl.load(targets_ptr + row)
    words = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_word = words < NUM_WORDS
    found = tl.load(source_ptr + source * NUM_WORDS + words, mask=is_word)
    tl.store(target_ptr + target * NUM_WORDS + words, found, mask=is_word)


def copy_rows_triton(
    source: torch.Tensor, sources: torch.Tensor | None, target: torch.Tensor, targets: torch.Tensor | None
) -> None:
    """Copy row `sources[i]` of `source` [num_rows, row_bytes] to row `targets[i]` of `target`; None is row i."""
    assert source.dtype == target.dtype == torch.uint8
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert source.shape[1] == target.shape[1]
    numbers = [each for each in (sources, targets) if each is not None]
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in numbers)
    (num_copies,) = {len(each) for each in numbers}
    assert sources is not None or len(source) == num_copies
    assert targets is not None or len(target) == num_copies
    if num_copies == 0:
        return
    dtype = _word(source.shape[1] | source.data_ptr() | target.data_ptr())
    piece = PIECE_BYTES // dtype.itemsize
    num_words = source.shape[1] // dtype.itemsize
    _copy_rows_kernel[num_copies, triton.cdiv(num_words, piece)](
        source.view(dtype), sources, target.view(dtype), targets, NUM_WORDS=num_words, PIECE=piece, **OPTIONS
    )


def _word(multiple: int) -> torch.dtype:
    """The widest integers of which `multiple` is one."""
    return next(
        dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if multiple % dtype.itemsize == 0
    )
