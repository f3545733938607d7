"""The random numbers of draws: each a function of seed, choice, position, purpose and token alone, on every device.

Philox 4x32-10 makes four words of 32 bits of a key, the seed, and a counter: block, position, choice, purpose. Of a
group of 64 tokens, token 16 * word + lane has that word of block 16 * group + lane, so that vectors of any length up to
16 tokens take the same word of as many blocks. A word w is the number u = (w + 1/2) / 2**32, never 0 or 1, and Gumbel
noise is -log(-log(1 - u)), at most 22.9.
Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3; Gumbel 1954, Statistical theory of extreme
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch

GROUP = 64
LANES = 16
NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


Counter: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Purpose(IntEnum):
    """What a draw is for: numbers of one purpose are independent of those of another."""

    TOKEN = 0
    ACCEPTANCE = 1
    RECOVERY = 2


def philox(counter: Counter, key: tuple[int, int]) -> Counter:
    """Four words for each counter, whose four are int64 tensors of one shape; all are numbers of 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # A product of 64 bits comes out negative where its top bit is set; its bits are right all the same.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        c2 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, c3 = second, first  # whose upper halves end in the next round
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseKey:
    """Whose numbers: the seed has 64 bits, choice and position have 32."""

    seed: int
    choice_index: int
    position: int
    purpose: Purpose = Purpose.TOKEN

    def _words(self, blocks: torch.Tensor) -> torch.Tensor:
        """Those of each of `blocks` [num_blocks] int64, [4, num_blocks] int64."""
        position, choice, purpose = (
            torch.full_like(blocks, value & _WORD) for value in (self.position, self.choice_index, self.purpose)
        )
        return torch.stack(philox((blocks, position, choice, purpose), (self.seed & _WORD, self.seed >> 32 & _WORD)))

    def uniforms(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """The numbers of all tokens, float64 [num_tokens]."""
        num_groups = -(-num_tokens // GROUP)
        words = self._words(torch.arange(num_groups * LANES, device=device))
        return _numbers(words.view(4, num_groups, LANES).transpose(0, 1).reshape(-1)[:num_tokens])

    def uniforms_at(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The numbers of some tokens, float64 [num_tokens]."""
        words = self._words(token_ids // GROUP * LANES + token_ids % LANES)
        return _numbers(words.gather(0, (token_ids // LANES % 4)[None])[0])


def _numbers(words: torch.Tensor) -> torch.Tensor:
    return words.double().add_(0.5).div_(2**32)


def gumbel(uniforms: torch.Tensor) -> torch.Tensor:
    return (1 - uniforms).log_().neg_().log_().neg_()  # 1 - u is exact
