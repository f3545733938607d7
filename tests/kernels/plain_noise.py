"""Gumbel noise once more, in Python's integers and floats, one token at a time."""

from __future__ import annotations

import math

MASK = 2**32 - 1


def plain_uniform(seed: int, choice: int, position: int, token_id: int, purpose: int = 0) -> float:
    words = [token_id // 64 * 16 + token_id % 16, position, choice, purpose]
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [second >> 32 ^ words[1] ^ key[0], second & MASK, first >> 32 ^ words[3] ^ key[1], first & MASK]
        key = [key[0] + 0x9E3779B9 & MASK, key[1] + 0xBB67AE85 & MASK]
    return (words[token_id // 16 % 4] + 0.5) / 2**32


def plain_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    return -math.log(-math.log(1 - plain_uniform(seed, choice, position, token_id)))
