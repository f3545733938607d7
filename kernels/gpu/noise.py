"""See `kernels.noise`; in float32, where noise is right to some 1e-6."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
LANES = tl.constexpr(16)


@triton.jit
def noise_words(seed_low, seed_high, position, choice, blocks, PURPOSE: tl.constexpr):
    """The four words of each of `blocks` [N] int32; seed, position and choice are int32."""
    seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True)
    nothing = blocks * 0
    return tl.philox(seed, blocks, nothing + position, nothing + choice, nothing + PURPOSE)


@triton.jit
def tokens_of(blocks, WORD: tl.constexpr):
    """Whose word number WORD of a block is."""
    return blocks // LANES * GROUP + WORD * LANES + blocks % LANES


@triton.jit
def uniform(words):
    """Between 0 and 1, neither included."""
    return tl.minimum(words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 1 - 5.960464477539063e-08)


@triton.jit
def gumbel(words):
    u = uniform(words)
    # Near 0 log(1 - u) would be that of a rounded number; there its series has the digits.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))
