"""Log-probabilities of tokens under the model's own distribution: before temperature, penalties, masks and truncation.

So they are finite for every token, whatever sampling did, and do not depend on how a token was chosen. What the device
does and what becomes of it in Python are two steps, between which nobody need wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.host_copy import HostCopy, to_device
from kernels.top_tokens import top_tokens
from weir.core.request import TokenLogprobs

ROWS_AT_ONCE = 32
"""Rows that are widened to float64 together: 12 MB at a vocabulary of 49,152."""


@torch.inference_mode()
def measure_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: Sequence[int],
    log_normalizers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Natural-log probability and rank of one token a row, and the most likely tokens of the row: what `read_logprobs`
    reads, float64 [num_rows, 3 + 2 * most of num_top], on the device of the logits.

    Args:
        logits: [num_rows, vocab_size] float32, as the model gave them.
        token_ids: [num_rows] int64, the token that stands at each row's position.
        num_top: how many of the most likely tokens each row wants; 0 for none, -1 for the whole vocabulary.
        log_normalizers: [num_rows], the logarithm of the sum of the exponentials of each row, where it is known.
    """
    width = max(_counts(num_top, logits.shape[1]), default=0)
    found = [logits.new_empty((0, 3 + 2 * width), dtype=torch.float64)]
    for start in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        known = None if log_normalizers is None else log_normalizers[rows]
        found.append(_measure_rows(logits[rows], token_ids[rows], width, known))
    return torch.cat(found)


def _measure_rows(
    logits: torch.Tensor, token_ids: torch.Tensor, width: int, log_normalizers: torch.Tensor | None
) -> torch.Tensor:
    if log_normalizers is None:
        log_normalizers = torch.logsumexp(logits.double(), dim=1)
    normalizers = log_normalizers.double()[:, None]
    targets = token_ids[:, None].clamp(min=0)  # a draw that failed has no token
    own = logits.gather(1, targets)
    # The rank is the place in the exact order of `top_tokens`.
    is_lower_id = torch.arange(logits.shape[1], device=logits.device) < targets
    ranks = 1 + ((logits > own) | ((logits == own) & is_lower_id)).sum(dim=1, keepdim=True)
    columns = [targets.double(), own.double() - normalizers, ranks.double()]
    if width:
        top_ids = top_tokens(logits, width)
        columns += [top_ids.double(), logits.gather(1, top_ids).double() - normalizers]
    return torch.cat(columns, dim=1)


def read_logprobs(measured: torch.Tensor, num_top: Sequence[int], vocab_size: int) -> tuple[TokenLogprobs, ...]:
    """What was measured, on the CPU by now.

    Raises:
        FloatingPointError: a row is not finite.
    """
    width = (measured.shape[1] - 3) // 2
    token_ids, logprobs, ranks = measured[:, :3].unbind(1)
    if not bool(logprobs.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite")
    top_ids, top_logprobs = measured[:, 3 : 3 + width].long().tolist(), measured[:, 3 + width :].tolist()
    return tuple(
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(row_ids[:count]),
            top_logprobs=tuple(row_logprobs[:count]),
        )
        for token_id, logprob, rank, count, row_ids, row_logprobs in zip(
            token_ids.long().tolist(),
            logprobs.tolist(),
            ranks.long().tolist(),
            _counts(num_top, vocab_size),
            top_ids,
            top_logprobs,
            strict=True,
        )
    )


def _counts(num_top: Sequence[int], vocab_size: int) -> list[int]:
    return [vocab_size if count < 0 else min(count, vocab_size) for count in num_top]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLogprobs:
    """Those of some rows, on their way to the host."""

    measured: HostCopy
    num_top: tuple[int, ...]
    vocab_size: int

    def collect(self) -> tuple[TokenLogprobs, ...]:
        """Wait for them. Raises FloatingPointError where a row is not finite."""
        return read_logprobs(self.measured.wait(), self.num_top, self.vocab_size)


def launch_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> PendingLogprobs:
    """Begin to compute the log-probabilities of one known token a row; see `measure_logprobs`."""
    targets = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    measured = HostCopy(measure_logprobs(logits, targets, num_top))
    return PendingLogprobs(measured=measured, num_top=tuple(num_top), vocab_size=logits.shape[1])
