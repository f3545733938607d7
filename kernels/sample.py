"""Draw one token for each row of scores: temperature, min-p, top-k, top-p, and the inverse of the distribution.

Which token that is depends on the row's scores and its `Draw` alone. The best token weighs 1, so nothing overflows.
Where a row is truncated its tokens stand in the order of their scores, of equal ones the lowest id first; else in the
order of their ids. The torch form computes in float64; the CPU's form has float32 weights and float64 sums, so that it
may choose the other of two neighbours where a draw falls within some 1e-6 of their border.
Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, for top-p; Devroye 1986, section II.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.plan import Plan
from kernels.cpu.structs import SampleRowStruct
from kernels.top_tokens import find_kth_largest, order_above

WEIGHT_FLOORS = (1e-2, 1e-4, 1e-6)
"""Against the best token's weight of 1; tried in turn until the tokens above hold the top-p share of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row's token is chosen.

    Attributes:
        temperature: over 0.
        top_k: 0 for the whole vocabulary.
        uniform: the random number, in [0, 1).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float

    def num_likeliest(self, vocab_size: int) -> int:
        """To how many tokens `top_k` limits the choice."""
        return self.top_k if 0 < self.top_k < vocab_size else vocab_size


def sample_reference(scores: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Plain torch, on whatever device: `scores` [num_rows, vocab_size] float64.

    Raises:
        FloatingPointError: the best score of a row is not finite.
    """
    device = scores.device
    best = scores.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError("the model's logits are not finite")
    temperatures = torch.tensor([draw.temperature for draw in draws], dtype=torch.float64, device=device)
    weights = ((scores - best) / temperatures[:, None]).exp()
    if any(draw.min_p for draw in draws):
        min_p = torch.tensor([draw.min_p for draw in draws], dtype=torch.float64, device=device)
        weights = weights.masked_fill(weights < min_p[:, None], 0)
    uniforms = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=device)
    token_ids = [0] * len(draws)
    vocab_size = scores.shape[1]
    is_truncated = [draw.num_likeliest(vocab_size) < vocab_size or draw.top_p < 1 for draw in draws]
    for wanted in (False, True):
        places = [place for place, truncated in enumerate(is_truncated) if truncated is wanted]
        if not places:
            continue
        part, numbers = (weights, uniforms) if len(places) == len(draws) else (weights[places], uniforms[places])
        if wanted:
            tokens = _draw_truncated(part, numbers, [draws[place] for place in places])
        else:
            tokens = _invert(part, numbers).tolist()
        for place, token_id in zip(places, tokens, strict=True):
            token_ids[place] = token_id
    return token_ids


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The column at which the running sum of a row first exceeds its share `uniforms` of the whole.

    A running sum adds one row in one order, so a neighbour cannot change a rounding. Columns of no weight are never
    chosen.
    """
    sums = weights.cumsum(dim=1)
    totals = sums[:, -1:].contiguous()
    columns = torch.searchsorted(sums, totals * uniforms[:, None], right=True)
    # Rounding may bring the product up to the total, which no running sum exceeds.
    return torch.minimum(columns, torch.searchsorted(sums, totals))[:, 0]


def _draw_truncated(weights: torch.Tensor, uniforms: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The same within the top-k most likely tokens and of those the fewest that make up top-p of the weight."""
    num_rows, vocab_size = weights.shape
    device = weights.device
    top_p = torch.tensor([draw.top_p for draw in draws], dtype=torch.float64, device=device)
    counts = torch.tensor([draw.num_likeliest(vocab_size) for draw in draws], device=device)
    has_top_k = counts < vocab_size
    thresholds = torch.zeros(num_rows, dtype=torch.float64, device=device)
    totals = torch.zeros(num_rows, dtype=torch.float64, device=device)
    by_count, by_share = has_top_k.nonzero()[:, 0], (~has_top_k).nonzero()[:, 0]
    if len(by_count):
        thresholds[by_count] = find_kth_largest(weights[by_count], counts[by_count])
    if len(by_share):
        totals[by_share] = weights[by_share].cumsum(dim=1)[:, -1]
        thresholds[by_share] = _find_floors(weights[by_share], (top_p * totals)[by_share])
    ordered, token_ids = order_above(weights, thresholds)
    # Of tokens equal to the k-th, only the first ones count.
    columns = torch.arange(ordered.shape[1], device=device)
    ordered = ordered.clamp(min=0).masked_fill(columns >= counts[:, None], 0)
    sums = ordered.cumsum(dim=1)
    totals = torch.where(has_top_k, sums[:, -1], totals)
    # A token is kept while those before it do not make up top-p yet; so the first always is.
    is_beyond = torch.zeros_like(ordered, dtype=torch.bool)
    is_beyond[:, 1:] = sums[:, :-1] >= (top_p * totals)[:, None]
    chosen = _invert(ordered.masked_fill(is_beyond, 0), uniforms)
    tokens: list[int] = token_ids.gather(1, chosen[:, None])[:, 0].tolist()
    return tokens


def _find_floors(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """For each row a weight such that the tokens from it up hold at least `shares` [num_rows]; 0 where none of
    `WEIGHT_FLOORS` does."""
    floors = torch.zeros_like(shares)
    left = torch.arange(len(weights), device=weights.device)
    for floor in WEIGHT_FLOORS:
        part = weights[left]
        # The margin keeps rounding from ever cutting off a token that the order of the whole row would keep.
        is_enough = part.masked_fill(part < floor, 0).sum(dim=1) > shares[left] * (1 + 1e-9)
        floors[left[is_enough]] = floor
        left = left[~is_enough]
        if not len(left):
            break
    return floors


def sample_cpu(plan: Plan, rows: Sequence[torch.Tensor], draws: Sequence[Draw]) -> list[int]:
    """`kernels/cpu/sample.h`, by the plan's threads: `rows` are float32 [vocab_size] each, contiguous, on the CPU.

    Raises:
        FloatingPointError: the best score of a row is not finite.
    """
    vocab_size = rows[0].shape[0]
    structs = (SampleRowStruct * len(rows))(
        *(
            SampleRowStruct(
                scores=row.data_ptr(),
                temperature=draw.temperature,
                min_p=draw.min_p,
                top_p=draw.top_p,
                uniform=draw.uniform,
                top_k=draw.num_likeliest(vocab_size) % vocab_size,
            )
            for row, draw in zip(rows, draws, strict=True)
        )
    )
    plan.sample(structs, vocab_size)
    token_ids = [struct.token for struct in structs]
    if min(token_ids) < 0:
        raise FloatingPointError("the model's logits are not finite")
    return token_ids
