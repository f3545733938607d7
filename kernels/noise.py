"""The random numbers of draws: each a function of seed, choice, position, purpose and token alone, on every device.

Philox 4x32-10 makes four words of 32 bits of a key, the seed, and a counter: block, position, choice, purpose. Of a
group of 64 tokens, token 16 * word + lane has that word of block 16 * group + lane, so that vectors of any length up to
16 tokens take the same word of as many blocks. A word w is the number u = (w + 1/2) / 2**32, never 0 or 1, and Gumbel
noise is -log(-log(1 - u)), at most 22.9.
Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3; Gumbel 1954, Statistical theory of extreme
values.
"""

from __future__ import annotations

from enum import IntEnum

import torch

GROUP = 64
LANES = 16
NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a draw is for: numbers of one purpose are independent of those of another."""

    TOKEN = 0
    ACCEPTANCE = 1
    RECOVERY = 2


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words; all are int64 tensors of numbers of 32 bits, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # A product of 64 bits comes out negative where its top bit is set; its bits are right all the same.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> 32 & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = (first >> 32 & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def uniforms(
    seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor, num_tokens: int, purpose: Purpose
) -> torch.Tensor:
    """A number for each token, float64 [num_rows, num_tokens]; the others are int64 [num_rows], seeds as 64 bits."""
    num_groups = -(-num_tokens // GROUP)
    blocks = torch.arange(num_groups * LANES, device=seeds.device)
    seeds, choices, positions = seeds[:, None], choices[:, None], positions[:, None]
    counter = (blocks[None, :], positions & _WORD, choices & _WORD, torch.full_like(choices, purpose))
    words = philox(counter, (seeds & _WORD, seeds >> 32 & _WORD))
    lanes = torch.stack([word.view(len(seeds), num_groups, LANES) for word in words], dim=2)
    return (lanes.view(len(seeds), -1)[:, :num_tokens].double() + 0.5) / 2**32


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log1p(-uniforms))
