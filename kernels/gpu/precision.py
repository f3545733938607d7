"""Products and roundings of every kernel here.

Triton's interpreter multiplies bfloat16 wrongly, cuts it off where a GPU rounds to nearest, and knows neither roundings
nor NaN of float8, so there operands of products are float32, whose values are the same, and rounding is done by hand.
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
    if dtype == tl.float8e4nv:
        return as_float8(values)
    return values.to(dtype)


@triton.jit
def widened(values, dtype: tl.constexpr):
    """Float `values` of fewer bits as `dtype`."""
    if IS_INTERPRETED:
        exact = values.to(tl.float32)
        if values.dtype == tl.float8e4nv:
            is_nan = (values.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
            exact = tl.where(is_nan, float("nan"), exact)
        return rounded(exact, dtype)
    return values.to(dtype)


@triton.jit
def as_float8(values):
    """Float32 `values` as float8_e4m3fn, to nearest even; beyond its range they become its ends, NaN stays."""
    within = tl.where(values > 448.0, 448.0, tl.where(values < -448.0, -448.0, values))
    if IS_INTERPRETED:
        bits = within.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)  # exponents begin at 2^-6 here
        small = (tl.abs(within) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF  # in units of 2^-9
        code = tl.where(tl.abs(within) < 0.015625, small, normal)
        code = tl.where(within != within, 0x7F, code) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return within.to(tl.float8e4nv)
