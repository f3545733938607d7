"""Draw one token for each row of scores: temperature, min-p, top-k, top-p, and Gumbel's noise.

Kept are the tokens whose weight exp((score - best) / temperature) is at least min-p; of those the top-k with the best
scores, of equal ones the lowest ids first; of those, in that order, as many as make up top-p of their weight. Of the
kept tokens the one is chosen whose score / temperature + noise is highest, of equal ones the lowest id; so each is
chosen as often as its share of the weight says, and which one depends on the row's scores and its `Draw` alone. The
noise is that of `noise.py`. A temperature of 0, and any below `LEAST_TEMPERATURE`, takes the best score.

The torch form computes in float64; the CPU's has float32 weights and float64 sums, of weights and of score and noise,
the GPU's is float32: either may differ from the torch form by a token where two are closer than its rounding.
Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, for top-p; Maddison et al. 2014,
A* sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.plan import Plan
from kernels.cpu.structs import SampleRowStruct
from kernels.host_copy import to_device
from kernels.noise import NoiseKey, Purpose, gumbel
from kernels.top_tokens import top_tokens

LEAST_TEMPERATURE = 1e-30
NUM_LIKELIEST = 4096
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one token is chosen.

    Attributes:
        row: of the scores; several draws may share one.
        temperature: 0 for the best token.
        top_k: 0 for the whole vocabulary.
        seed, choice_index, position: what the noise depends on; the seed has 64 bits, the others 32.
    """

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    position: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    def is_truncated(self, vocab_size: int) -> bool:
        return not self.is_greedy and (self.num_likeliest(vocab_size) < vocab_size or self.top_p < 1 or self.min_p > 0)

    def noise_key(self, purpose: Purpose = Purpose.TOKEN) -> NoiseKey:
        return NoiseKey(seed=self.seed, choice_index=self.choice_index, position=self.position, purpose=purpose)

    def num_likeliest(self, vocab_size: int) -> int:
        """To how many tokens `top_k` limits the choice."""
        return self.top_k if 0 < self.top_k < vocab_size else vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What was drawn, on the device of the scores.

    Attributes:
        token_ids: [num_draws] int64; -1 where the best score is not finite or one is no number.
        log_normalizers: [num_draws] float32, the logarithm of the sum of the exponentials of each draw's logits, where
            the body that drew has them from the same pass.
    """

    token_ids: torch.Tensor
    log_normalizers: torch.Tensor | None = None


def sample_reference(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Plain torch, on whatever device: token ids [num_draws] int64 of `scores` [num_rows, vocab_size] float32. One row
    after the other: what it takes stays in a processor's cache."""
    return torch.stack([_sample_row(scores[draw.row], draw) for draw in draws])


def _sample_row(scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    best = scores.amax().double()  # a number that is none is the best of its row
    if not bool(best.isfinite()):
        return torch.tensor(-1, device=scores.device)
    race = scores.double() - best
    token_ids = torch.arange(len(scores), device=scores.device)
    if not draw.is_greedy:
        race /= draw.temperature
        if draw.is_truncated(len(scores)):
            token_ids = _kept(race.exp(), scores, draw).nonzero()[:, 0]
            race = race[token_ids] + gumbel(draw.noise_key().uniforms_at(token_ids))
        else:
            race += gumbel(draw.noise_key().uniforms(len(scores), scores.device))
    return token_ids[race == race.amax()].amin()


def _kept(weights: torch.Tensor, scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Which tokens may be chosen, [vocab_size] bool."""
    vocab_size = len(scores)
    is_kept = weights >= min(draw.min_p, 1.0)
    top_k = draw.num_likeliest(vocab_size)
    if top_k == vocab_size and draw.top_p >= 1:
        return is_kept
    total = weights.masked_fill(~is_kept, 0).sum()
    # To put so many in order is mostly enough for top-p.
    for num_ordered in (top_k,) if top_k < vocab_size else (min(NUM_LIKELIEST, vocab_size), vocab_size):
        order = top_tokens(scores[None], num_ordered)[0]
        is_first = is_kept[order]
        if draw.top_p < 1:
            sums = weights[order].masked_fill(~is_first, 0).cumsum(0)
            # A token is kept while those before it do not make up top-p yet; so the first always is.
            is_first[1:] &= sums[:-1] < draw.top_p * (sums[-1] if top_k < vocab_size else total)
        if not is_first[-1]:
            break
    return torch.zeros_like(is_kept).scatter(0, order, is_first)


def sample_cpu(plan: Plan, scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """`kernels/cpu/sample.h`, by the plan's threads: `scores` are float32, rows contiguous, on the CPU."""
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    vocab_size = scores.shape[1]
    start, row_bytes = scores.data_ptr(), scores.stride(0) * scores.element_size()
    structs = (SampleRowStruct * len(draws))(
        *(
            SampleRowStruct(
                start + draw.row * row_bytes,
                0.0 if draw.is_greedy else draw.temperature,
                draw.min_p,
                draw.top_p,
                draw.seed & _MASK,
                draw.position,
                draw.choice_index,
                draw.num_likeliest(vocab_size) % vocab_size,
            )
            for draw in draws
        )
    )
    plan.sample(structs, vocab_size)
    return torch.tensor([struct.token for struct in structs])


def sample(
    scores: torch.Tensor, draws: Sequence[Draw], plan: Plan | None = None, *, logits: torch.Tensor | None = None
) -> Drawn:
    """Draw a token for each of `draws`, at least one, from its row of `scores` [num_rows, vocab_size].

    Nothing here waits for a GPU.

    Args:
        plan: whose threads draw on a CPU.
        logits: the scores as they were before any processing, row for row, where log-normalizers are welcome.
    """
    if scores.is_cuda:
        from kernels.gpu.sample import pack_draws, sample_triton

        words = to_device(pack_draws(draws, scores.shape[1]), scores.device)
        is_truncated = any(draw.is_truncated(scores.shape[1]) for draw in draws)
        token_ids, log_normalizers = sample_triton(scores, words, logits, is_truncated=is_truncated)
        return Drawn(token_ids=token_ids, log_normalizers=log_normalizers)
    return Drawn(token_ids=sample_reference(scores, draws) if plan is None else sample_cpu(plan, scores, draws))
