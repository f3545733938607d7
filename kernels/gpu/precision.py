"""Products and roundings of every kernel here.

Triton's interpreter multiplies bfloat16 wrongly and cuts it off where a GPU rounds to nearest, so there operands of
products are float32, whose values are the same, and rounding is done by hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(left, right):
    """[M, K] times [K, N], float32; float32 operands are not rounded to fewer bits."""
    if IS_INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Float32 `values` as `dtype`, to nearest even."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return values.to(dtype)
