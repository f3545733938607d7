"""Log-probabilities of tokens under the model's own distribution: before temperature, penalties, masks and truncation.

So they are finite for every token, whatever sampling did, and do not depend on how a token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.top_tokens import find_kth_largest, order_above
from weir.core.request import TokenLogprobs

ROWS_AT_ONCE = 32
"""Rows that are widened to float64 together: 12 MB at a vocabulary of 49,152."""


@torch.inference_mode()
def compute_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Rank and natural-log probability of one token a row, and the most likely tokens of the row.

    Args:
        logits: [num_rows, vocab_size], as the model gave them.
        token_ids: the token that stands at each row's position.
        num_top: how many of the most likely tokens each row wants; 0 for none, -1 for the whole vocabulary.

    Raises:
        FloatingPointError: a row is not finite.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        found.extend(_compute_rows(logits[rows].double(), token_ids[rows], num_top[rows]))
    return tuple(found)


def _compute_rows(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    num_rows, vocab_size = logits.shape
    logprobs = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    targets = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(1, targets)
    if not bool(torch.isfinite(own).all()):
        raise FloatingPointError("the model's logits are not finite")
    # The rank is the place in the exact order of `top_tokens`.
    is_lower_id = torch.arange(vocab_size, device=logits.device) < targets
    ranks = 1 + ((logprobs > own) | ((logprobs == own) & is_lower_id)).sum(dim=1)

    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in num_top]
    top_values: list[list[float]] = [[]] * num_rows
    top_ids: list[list[int]] = [[]] * num_rows
    if any(counts):
        at_least_one = torch.tensor([max(count, 1) for count in counts], device=logits.device)
        values, ids = order_above(logprobs, find_kth_largest(logprobs, at_least_one))
        width = max(counts)
        top_values, top_ids = values[:, :width].tolist(), ids[:, :width].tolist()
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(row_ids[:count]),
            top_logprobs=tuple(row_values[:count]),
        )
        for token_id, logprob, rank, count, row_values, row_ids in zip(
            token_ids, own[:, 0].tolist(), ranks.tolist(), counts, top_values, top_ids, strict=True
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLogprobs:
    found: tuple[TokenLogprobs, ...]

    def collect(self) -> tuple[TokenLogprobs, ...]:
        return self.found


def launch_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> PendingLogprobs:
    return PendingLogprobs(found=compute_logprobs(logits, token_ids, num_top))
