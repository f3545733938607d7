"""What one step computes, as tensors: the bridge from the scheduler's words to the kernels' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kernels.cpu.plan import PlannedBatch
from weir.engine.staging import Staging

IntArray: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledSequence:
    """The part of one sequence that this step computes.

    Attributes:
        token_ids: tokens to compute, at least one.
        start: position of `token_ids[0]`, equal to the sequence's `num_computed_tokens`.
        block_ids: the sequence's block table; covers `start + len(token_ids)` tokens.
        num_logits: for how many of the last tokens logits are wanted: 0 for a chunk that is not the last, 1 to sample,
            len(token_ids) for prompt log-probabilities.
        late_source: where the one token, whose id here stands for it, is among the tokens that the previous step chose;
            None where the id is known.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    num_logits: int
    late_source: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArrays:
    """A `Batch` as it is laid out on the host, before it is brought to a device.

    Attributes:
        late_rows: [num_late] int64, rows whose token the previous step chose and only the device knows yet.
        late_sources: [num_late] int64, where those tokens are among all that it chose.
    """

    input_ids: IntArray
    positions: IntArray
    slots: IntArray
    cu_seqlens_q: IntArray
    seq_lens: IntArray
    logits_indices: IntArray
    block_tables: IntArray
    num_decodes: int
    late_rows: IntArray
    late_sources: IntArray

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @classmethod
    def from_scheduled(cls, items: Sequence[ScheduledSequence], block_size: int) -> BatchArrays:
        """Lay out `items`, at least one, for one step: decoding ones first, the longest first."""
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
        late = [(row, item.late_source) for row, item in enumerate(rows) if item.late_source is not None]
        return cls(
            input_ids=np.concatenate([np.array(item.token_ids, dtype=np.int64) for item in rows]),
            positions=positions,
            slots=slots,
            cu_seqlens_q=first_rows.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_tables=tables,
            logits_indices=np.array(logits, dtype=np.int64),
            num_decodes=int((counts == 1).sum()),
            late_rows=np.array([row for row, _ in late], dtype=np.int64),
            late_sources=np.array([source for _, source in late], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step of ragged sequences: rows of decoding ones first, the longest first; logits in the order given.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        slots: [num_tokens] int64, where each token's K and V go; below 0 nowhere.
        cu_seqlens_q: [num_seqs + 1] int32, first row of each sequence.
        seq_lens: [num_seqs] int32, tokens with K and V once the step has run.
        logits_indices: [num_logits] int64, rows whose logits are wanted, in the order in which sequences were given.
        block_tables: [num_seqs, max_blocks] int32, padded with the sequence's own first block.
        num_decodes: leading sequences that have exactly one row.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @classmethod
    def on_host(cls, arrays: BatchArrays, chosen: torch.Tensor | None = None) -> Batch:
        """The memory of `arrays` itself; `chosen` as in `on_device`."""
        tensors = [torch.from_numpy(getattr(arrays, name)) for name in (*TENSOR_FIELDS, *_LATE_FIELDS)]
        return cls._of_tensors(tensors, arrays, chosen)

    @classmethod
    def on_device(
        cls, arrays: BatchArrays, staging: Staging, chosen: torch.Tensor | None = None, into: torch.Tensor | None = None
    ) -> Batch:
        """What `staging` brings to its device; nobody waits for it.

        Args:
            chosen: the tokens that the previous step chose, where `arrays` has late rows.
            into: see `Staging.send`; of equal numbers of sequences and tokens all but the tables' width lies the same.
        """
        tensors = staging.send([getattr(arrays, name) for name in (*TENSOR_FIELDS, *_LATE_FIELDS)], into)
        return cls._of_tensors(tensors, arrays, chosen)

    @classmethod
    def _of_tensors(
        cls, all_tensors: Sequence[torch.Tensor], arrays: BatchArrays, chosen: torch.Tensor | None
    ) -> Batch:
        *tensors, late_rows, late_sources = all_tensors
        batch = cls(**dict(zip(TENSOR_FIELDS, tensors, strict=True)), num_decodes=arrays.num_decodes)
        if len(late_rows):
            assert chosen is not None, "late tokens of no step"
            batch.input_ids.index_copy_(0, late_rows, chosen.index_select(0, late_sources))
        return batch


_LATE_FIELDS = ("late_rows", "late_sources")
TENSOR_FIELDS = tuple(name for name in Batch.__slots__ if name != "num_decodes")

AnyBatch: TypeAlias = Batch | PlannedBatch
"""What a model computes now, or stands for every batch to come."""
