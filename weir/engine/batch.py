"""What one step computes, as tensors: the bridge from the scheduler's words to the kernels' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kernels.cpu.plan import PlannedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The part of one sequence that this step computes.

    Attributes:
        token_ids: tokens to compute, at least one.
        start: position of `token_ids[0]`, equal to the sequence's `num_computed_tokens`.
        block_ids: the sequence's block table; covers `start + len(token_ids)` tokens.
        num_logits: for how many of the last tokens logits are wanted: 0 for a chunk that is not the last, 1 to sample,
            len(token_ids) for prompt log-probabilities.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step of ragged sequences: rows of decoding ones first, the longest first; logits in the order given.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        slots: [num_tokens] int64, where each token's K and V go.
        cu_seqlens_q: [num_seqs + 1] int32, first row of each sequence.
        seq_lens: [num_seqs] int32, tokens with K and V once the step has run.
        block_tables: [num_seqs, max_blocks] int32, padded with the sequence's own first block.
        logits_indices: [num_logits] int64, rows whose logits are wanted, in the order in which sequences were given.
        num_decodes: leading sequences that have exactly one row.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    num_decodes: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def from_scheduled(cls, items: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> Batch:
        """Lay out `items`, at least one, for one step."""
        order = sorted(range(len(items)), key=lambda i: (0, -items[i].end) if len(items[i].token_ids) == 1 else (1, 0))
        rows = [items[i] for i in order]
        counts = np.array([len(item.token_ids) for item in rows])
        ends = np.array([item.end for item in rows])
        first_rows = np.concatenate(([0], np.cumsum(counts)))
        num_blocks = -(-ends // block_size)
        tables = np.empty((len(rows), num_blocks.max()), dtype=np.int32)
        for table, item, count in zip(tables, rows, num_blocks, strict=True):
            assert len(item.block_ids) >= count, f"{item.sequence_id}: block table does not cover its tokens"
            table[:count] = item.block_ids[:count]
            table[count:] = item.block_ids[0]
        owners = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(first_rows[-1]) + (ends - first_rows[1:])[owners]
        slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
        last_rows = dict(zip(order, first_rows[1:], strict=True))
        logits = [row for i, item in enumerate(items) for row in range(last_rows[i] - item.num_logits, last_rows[i])]

        def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            input_ids=tensor(np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in rows])),
            positions=tensor(positions),
            slots=tensor(slots),
            cu_seqlens_q=tensor(first_rows.astype(np.int32)),
            seq_lens=tensor(ends.astype(np.int32)),
            block_tables=tensor(tables),
            logits_indices=tensor(np.array(logits, dtype=np.int64)),
            num_decodes=int((counts == 1).sum()),
        )


AnyBatch: TypeAlias = Batch | PlannedBatch
"""What a model computes now, or stands for every batch to come."""
