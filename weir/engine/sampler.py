"""Chooses tokens from logits. Every choice is a pure function of the row's logits, its sequence and one random number,
and that number is a pure function of (seed, choice index, position): no generator runs, and no neighbour matters.

Order of work on a row: logit bias; repetition penalty (prompt and output); frequency and presence penalty (output
alone); masks (allowed tokens, bad words, stop tokens before `min_tokens`); then greedy, or temperature, min-p, top-k,
top-p and one draw by inverse CDF in float64. Tokens of equal weight stand in the order of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from weir.core.request import SamplingParams, TokenLogprobs
from weir.engine.logprobs import compute_logprobs
from weir.engine.top_tokens import find_kth_largest, order_above

WEIGHT_FLOORS = (1e-2, 1e-4, 1e-6)
"""Against the best token's weight of 1; tried in turn until the tokens above hold the top-p share of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One token to choose.

    Attributes:
        logits_row: which row of the logits; several choices may share one.
        token_ids: prompt and output so far; the new token's position is their number.
        output_counts: how often each token occurs in the output.
        stop_token_ids: tokens that would end the sequence; masked before `min_tokens`.
    """

    logits_row: int
    params: SamplingParams
    choice_index: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    output_counts: Mapping[int, int] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def needs_processing(self) -> bool:
        """Whether anything changes the logits before the choice."""
        params = self.params
        return bool(
            params.logit_bias
            or params.repetition_penalty != 1
            or params.frequency_penalty
            or params.presence_penalty
            or params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or self.masks_stop_tokens
        )

    @property
    def masks_stop_tokens(self) -> bool:
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens and bool(self.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


def draw_uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine."""
    key = b"weir.draw.1" + b"".join(
        (value & (2**64 - 1)).to_bytes(8, "little") for value in (seed, choice_index, position)
    )
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[SampledToken, ...]:
    """Choose one token for each of `rows`.

    Args:
        logits: [num_logits, vocab_size] float32; not changed.

    Raises:
        FloatingPointError: a row's logits are not finite, so that no token could be chosen honestly.
    """
    token_ids = [0] * len(rows)
    plain = [index for index, row in enumerate(rows) if row.is_greedy and not row.needs_processing]
    if plain:
        _fill(token_ids, plain, _choose_greedily(_select(logits, rows, plain)))
    others = [index for index, row in enumerate(rows) if not row.is_greedy or row.needs_processing]
    if others:
        scores = _process(_select(logits, rows, others).double(), [rows[index] for index in others])
        for is_greedy in (True, False):
            places = [place for place, index in enumerate(others) if rows[index].is_greedy is is_greedy]
            if not places:
                continue
            part = scores if len(places) == len(others) else scores[places]
            chosen = [others[place] for place in places]
            tokens = _choose_greedily(part) if is_greedy else _draw(part, [rows[index] for index in chosen])
            _fill(token_ids, chosen, tokens)
    return tuple(
        SampledToken(token_id=token_id, logprobs=logprobs)
        for token_id, logprobs in zip(token_ids, _logprobs_of(logits, rows, token_ids), strict=True)
    )


def _fill(token_ids: list[int], indices: Sequence[int], tokens: Sequence[int]) -> None:
    for index, token_id in zip(indices, tokens, strict=True):
        token_ids[index] = token_id


def _select(logits: torch.Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> torch.Tensor:
    wanted = [rows[index].logits_row for index in indices]
    if wanted == list(range(len(logits))):
        return logits
    return logits[torch.tensor(wanted, device=logits.device)]


def _logprobs_of(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if wanted:
        computed = compute_logprobs(
            _select(logits, rows, wanted),
            [token_ids[index] for index in wanted],
            [rows[index].params.logprobs or 0 for index in wanted],
        )
        for index, logprobs in zip(wanted, computed, strict=True):
            found[index] = logprobs
    return found


def _choose_greedily(scores: torch.Tensor) -> list[int]:
    """The best token of each row; of equal ones the lowest id. A NaN anywhere in a row shows in its maximum."""
    best = scores.max(dim=1)
    if not all(map(math.isfinite, best.values.tolist())):
        raise FloatingPointError("the model's logits are not finite")
    tokens: list[int] = best.indices.tolist()
    return tokens


def _process(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply bias, penalties and masks; `scores` [num_rows, vocab_size] float64 is changed in place."""
    _add_bias(scores, rows)
    _apply_repetition_penalty(scores, rows)
    _apply_output_penalties(scores, rows)
    for place, row in enumerate(rows):
        if row.needs_processing:
            _mask(scores[place], row)
    return scores


class _Entries:
    """Coordinates in a matrix of scores with one value each, gathered row by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.token_ids: list[int] = []
        self.values: list[float] = []

    def extend(self, row: int, token_ids: Sequence[int], values: Sequence[float]) -> None:
        self.rows.extend([row] * len(token_ids))
        self.token_ids.extend(token_ids)
        self.values.extend(values)

    def tensors(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        places = (torch.tensor(self.rows, device=device), torch.tensor(self.token_ids, device=device))
        return places, torch.tensor(self.values, dtype=torch.float64, device=device)


def _add_bias(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        if row.params.logit_bias:
            token_ids, biases = zip(*row.params.logit_bias, strict=True)
            entries.extend(place, token_ids, biases)
    if entries.rows:
        places, biases_tensor = entries.tensors(scores.device)
        scores[places] += biases_tensor


def _apply_repetition_penalty(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        if row.params.repetition_penalty != 1:
            seen = list(set(row.token_ids))
            entries.extend(place, seen, [row.params.repetition_penalty] * len(seen))
    if entries.rows:
        places, penalties = entries.tensors(scores.device)
        current = scores[places]
        scores[places] = torch.where(current > 0, current / penalties, current * penalties)


def _apply_output_penalties(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = _Entries()
    for place, row in enumerate(rows):
        params = row.params
        if params.frequency_penalty or params.presence_penalty:
            addends = [
                -params.frequency_penalty * count - params.presence_penalty for count in row.output_counts.values()
            ]
            entries.extend(place, list(row.output_counts), addends)
    if entries.rows:
        places, addend_tensor = entries.tensors(scores.device)
        scores[places] += addend_tensor


def _mask(scores: torch.Tensor, row: SamplingRow) -> None:
    """Set what may not be chosen to minus infinity; `scores` is one row.

    Where bad words and stop tokens would leave nothing of the allowed tokens, the allowed tokens win.
    """
    banned = set(row.stop_token_ids) if row.masks_stop_tokens else set()
    output = row.token_ids[row.num_prompt_tokens :] if row.params.bad_words_token_ids else ()
    for *head, last in row.params.bad_words_token_ids:
        if not head or list(output[-len(head) :]) == head:
            banned.add(last)
    allowed = row.params.allowed_token_ids
    if allowed is not None:
        kept = [token_id for token_id in allowed if token_id not in banned] or list(allowed)
        kept_ids = torch.tensor(kept, device=scores.device)
        values = scores[kept_ids]
        scores.fill_(-torch.inf)
        scores[kept_ids] = values
    elif banned and len(banned) < len(scores):
        scores[torch.tensor(list(banned), device=scores.device)] = -torch.inf


def _draw(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One random token a row, from `scores` [num_rows, vocab_size] float64."""
    device = scores.device
    best = scores.amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(best).all()):
        raise FloatingPointError("the model's logits are not finite")
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64, device=device)
    # The best token weighs 1, so nothing overflows however small the temperature is.
    weights = ((scores - best) / temperatures[:, None]).exp()
    if any(row.params.min_p for row in rows):
        min_p = torch.tensor([row.params.min_p for row in rows], dtype=torch.float64, device=device)
        weights = weights.masked_fill(weights < min_p[:, None], 0)
    uniforms = torch.tensor(
        [draw_uniform(row.params.seed, row.choice_index, len(row.token_ids)) for row in rows],
        dtype=torch.float64,
        device=device,
    )
    token_ids = [0] * len(rows)
    vocab_size = scores.shape[1]
    is_truncated = [0 < row.params.top_k < vocab_size or row.params.top_p < 1 for row in rows]
    for wanted in (False, True):
        places = [place for place, truncated in enumerate(is_truncated) if truncated is wanted]
        if not places:
            continue
        part, draws = (weights, uniforms) if len(places) == len(rows) else (weights[places], uniforms[places])
        if wanted:
            tokens = _draw_truncated(part, draws, [rows[place].params for place in places])
        else:
            tokens = _invert(part, draws).tolist()
        _fill(token_ids, places, tokens)
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


def _draw_truncated(weights: torch.Tensor, uniforms: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
    """The same within the top-k most likely tokens and of those the fewest that make up top-p of the weight."""
    num_rows, vocab_size = weights.shape
    device = weights.device
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    has_top_k = torch.tensor([0 < p.top_k < vocab_size for p in params], device=device)
    counts = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=device)
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
