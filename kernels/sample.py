"""Draw one token for each row of scores: temperature, min-p, top-k, top-p, and Gumbel's noise.

Kept are the tokens whose weight exp((score - best) / temperature) is at least min-p; of those the top-k with the best
scores, of equal ones the lowest ids first; of those, in that order, as many as make up top-p of their weight. Of the
kept tokens the one is chosen whose score / temperature + noise is highest, of equal ones the lowest id; so each is
chosen as often as its share of the weight says, and which one depends on the row's scores and its `Draw` alone. The
noise is that of `noise.py`. A temperature of 0, and any below `LEAST_TEMPERATURE`, takes the best score.

The torch form computes in float64; the CPU's has float32 weights and float64 sums of score and noise, the GPU's is
float32: either may differ from the torch form by a token where two are closer than its rounding.
Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, for top-p; Maddison et al. 2014,
A* sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.plan import Plan
from kernels.cpu.structs import SampleRowStruct
from kernels.noise import Purpose, gumbel, uniforms
from kernels.staging import to_device

LEAST_TEMPERATURE = 1e-30
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
    """Plain torch, on whatever device: token ids [num_draws] int64 of `scores` [num_rows, vocab_size]."""
    device, vocab_size = scores.device, scores.shape[1]
    scores = scores[_column([draw.row for draw in draws], device)].double()
    best = scores.amax(dim=1, keepdim=True)  # a number that is none is the best of its row
    temperatures = _column([1.0 if draw.is_greedy else draw.temperature for draw in draws], device)[:, None]
    race = (scores - best) / temperatures
    if truncated := [place for place, draw in enumerate(draws) if draw.is_truncated(vocab_size)]:
        places = _column(truncated, device)
        kept = _kept(race[places].exp(), scores[places], [draws[place] for place in truncated])
        race[places] = race[places].masked_fill(~kept, -torch.inf)
    if drawn := [place for place, draw in enumerate(draws) if not draw.is_greedy]:
        places = _column(drawn, device)
        race[places] += gumbel(draw_uniforms([draws[place] for place in drawn], vocab_size, Purpose.TOKEN, device))
    token_ids = torch.arange(vocab_size, device=device)
    chosen = torch.where(race == race.amax(dim=1, keepdim=True), token_ids, vocab_size).amin(dim=1)
    return torch.where(best[:, 0].isfinite(), chosen, -1)


def draw_uniforms(draws: Sequence[Draw], num_tokens: int, purpose: Purpose, device: torch.device) -> torch.Tensor:
    """A number for each token, float64 [num_draws, num_tokens]."""
    seeds = _column([(draw.seed + 2**63 & _MASK) - 2**63 for draw in draws], device)
    choices = _column([draw.choice_index for draw in draws], device)
    positions = _column([draw.position for draw in draws], device)
    return uniforms(seeds, choices, positions, num_tokens, purpose)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    dtype = torch.float64 if isinstance(values[0], float) else torch.int64
    return torch.tensor(values, dtype=dtype, device=device)


def _kept(weights: torch.Tensor, scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Which tokens may be chosen, [num_rows, vocab_size] bool."""
    device, vocab_size = weights.device, weights.shape[1]
    top_k = _column([draw.num_likeliest(vocab_size) for draw in draws], device)[:, None]
    top_p = _column([float(draw.top_p) for draw in draws], device)[:, None]
    min_p = _column([min(float(draw.min_p), 1.0) for draw in draws], device)[:, None]
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    weights = weights.gather(1, order)
    is_kept = (weights >= min_p) & (torch.arange(vocab_size, device=device) < top_k)
    sums = weights.masked_fill(~is_kept, 0).cumsum(dim=1)
    # A token is kept while those before it do not make up top-p yet; so the first always is.
    is_kept[:, 1:] &= (sums[:, :-1] < top_p * sums[:, -1:]) | (top_p >= 1)
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


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
