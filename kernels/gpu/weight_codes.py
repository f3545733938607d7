"""Codes of a `QuantizedMatrix` as numbers, exact in every dtype of rows.

Where there is PTX, four bits and e4m3 are decoded two at a time. A code put into the mantissa of a power of two makes
that number plus the code, and one multiply-add takes the number and the zero away; the sign, exponent and mantissa of
e4m3 are moved to their places, and one multiplication mends the exponent. Compiled for sm_90 that is 1.4 instructions a
weight of four bits and 4.3 one of e4m3, where converting each for itself takes 5.5 and 8.8; an H200 has time for about
3 and 6 while it loads the next. Int8 needs no such help: the compiler's own conversion takes 4.
Source: Kim et al. 2022, Who says elephants can't run; Frantar et al. 2024, MARLIN, section 3.4.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _int4(kind: str, base: str, one: str) -> tl.constexpr:
    """Two words $4 and what is added to a code of each slice, $5 to $8: two numbers of each, $0 to $3."""
    slices = "".join(
        f"shr.u32 a, $4, {4 * index}; and.b32 a, a, 0x000F000F; or.b32 a, a, 0x{base}{base}; "
        f"fma.rn.{kind} ${index}, a, one, ${index + 5}; "
        for index in range(4)
    )
    return tl.constexpr(f"{{ .reg .b32 a, one; mov.b32 one, 0x{one}{one}; {slices}}}")


def _e4m3(*instructions: str) -> tl.constexpr:
    """Four bytes $2, two at a time in the upper halves of those of a: two times two numbers, $0 and $1."""
    halves = "".join(
        f"prmt.b32 a, $2, 0, {places}; " + "".join(f"{each}; " for each in instructions).replace("OUT", f"${index}")
        for index, places in enumerate(("0x1404", "0x3424"))
    )
    return tl.constexpr(f"{{ .reg .b32 a, b, c, d; {halves}}}")


BF16_INT4 = _int4("bf16x2", base="4300", one="3F80")  # in 128
FP16_INT4 = _int4("f16x2", base="6400", one="3C00")  # in 1024
BF16_E4M3 = _e4m3(  # bf16's exponents are 120 more, what is wanted 8 less
    "shr.u32 b, a, 4",
    "and.b32 b, b, 0x07F007F0",
    "and.b32 a, a, 0x80008000",
    "or.b32 b, b, a",
    "mov.b32 c, 0x77807780",
    "mov.b32 d, 0x80008000",
    "fma.rn.bf16x2 OUT, b, c, d",
)
FP16_E4M3 = _e4m3(  # float16's exponents are 8 more
    "shr.u32 b, a, 1",
    "and.b32 b, b, 0x3F803F80",
    "and.b32 a, a, 0x80008000",
    "or.b32 OUT, b, a",
)


@triton.jit
def _added(zeros, words, BASE: tl.constexpr, dtype: tl.constexpr):
    """What makes a number of a code in the mantissa of BASE, for every word."""
    return tl.broadcast_to((-BASE - zeros.to(tl.float32)).to(dtype)[:, None], words.shape)


@triton.jit
def nibble(words, zeros, SHIFT: tl.constexpr, dtype: tl.constexpr):
    """One slice of INT4, four bits from SHIFT on, less its zeros [N]."""
    codes = (words >> SHIFT) & 15
    return (codes.to(tl.float32) - zeros.to(tl.float32)[:, None]).to(dtype)


@triton.jit
def decoded_slices(words, zeros, HAS_PTX: tl.constexpr, dtype: tl.constexpr):
    """INT4: int16 `words` [N, S], and zeros [N] for each of their slices: four slices [N, S]."""
    if HAS_PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BF16_INT4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                _added(zeros[0], words, 128, dtype),
                _added(zeros[1], words, 128, dtype),
                _added(zeros[2], words, 128, dtype),
                _added(zeros[3], words, 128, dtype),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    if HAS_PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            FP16_INT4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                _added(zeros[0], words, 1024, dtype),
                _added(zeros[1], words, 1024, dtype),
                _added(zeros[2], words, 1024, dtype),
                _added(zeros[3], words, 1024, dtype),
            ],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return (
        nibble(words, zeros[0], 0, dtype),
        nibble(words, zeros[1], 4, dtype),
        nibble(words, zeros[2], 8, dtype),
        nibble(words, zeros[3], 12, dtype),
    )


@triton.jit
def decoded(codes, FORMAT: tl.constexpr, HAS_PTX: tl.constexpr, dtype: tl.constexpr):
    """INT8, or E4M3 as 1/256 of what it stands for: uint8 `codes`."""
    if FORMAT == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    if HAS_PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(BF16_E4M3, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    if HAS_PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(FP16_E4M3, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    halves = bits.to(tl.float16, bitcast=True)
    return halves if dtype == tl.float16 else halves.to(tl.float32).to(dtype)
