"""Products and roundings of every kernel here.

Triton's interpreter multiplies bfloat16 wrongly, and cuts it and e4m3 off where a GPU rounds to nearest, so there
operands of products are float32, whose values are the same, and rounding is done by hand.
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
    """Float32 `values` as `dtype`, to nearest even; as e4m3 to its largest where they are beyond it."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
    if IS_INTERPRETED and dtype == tl.float8e4nv:
        exponents = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
        unit = ((exponents - 3) << 23).to(tl.float32, bitcast=True)
        whole = values / unit + 12582912.0 - 12582912.0  # 1.5 * 2**23, where float32 has whole numbers only
        return tl.clamp(whole * unit, -448.0, 448.0).to(dtype)
    return values.to(dtype)
