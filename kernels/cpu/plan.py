"""A whole model step as one list of ops, written down once and then run by one call.

A model is written down by running it: its batch is made of `PlannedTensor`, its hidden states are `PlannedRows`, and
each op of `kernels` that meets one adds itself to the plan. Rows share memory with others that are not needed any more.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from ctypes import Array
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kernels.cpu.packed_matrix import GROUP, PackedMatrix
from kernels.cpu.structs import (
    BatchStruct,
    BufferStruct,
    CacheStruct,
    Format,
    Kind,
    OpStruct,
    RowFormat,
    SampleRowStruct,
)

KV_FORMATS = {
    torch.float32: Format.FLOAT32,
    torch.float16: Format.FLOAT16,
    torch.bfloat16: Format.BFLOAT16,
    torch.int8: Format.INT8,
}
DEFAULT_SPINS = 2000
"""Pauses before a waiting thread sleeps, some 20 us."""

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False, slots=True)
class PlannedRows:
    """Rows that a step will have, one for each token or, after `is_for_logits`, one for each wanted logit."""

    plan: Plan
    columns: int
    is_for_logits: bool = False
    format: RowFormat = RowFormat.FLOAT32

    @property
    def row_bytes(self) -> int:
        if self.format == RowFormat.FLOAT32:
            size = 4 * -(-self.columns // GROUP) * GROUP
        else:
            size = self.columns * (2 if self.format == RowFormat.INT16 else 1) + 8 * self.columns // GROUP
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, eq=False, slots=True)
class PlannedTensor:
    """Stands for one of a batch's tensors while a plan is written; a step has it from its `StepBatch`."""

    plan: Plan


AnyTensor: TypeAlias = torch.Tensor | PlannedTensor
AnyRows: TypeAlias = torch.Tensor | PlannedRows
"""What an op computes with: rows now, or rows of the steps to come."""


class PlannedBatch:
    """Stands for a step's batch while a plan is written."""

    def __init__(self, plan: Plan) -> None:
        self.input_ids = self.positions = self.slots = self.logits_indices = PlannedTensor(plan)


class StepBatch(Protocol):
    """One step, as `weir.engine.batch.Batch` has it; `num_decodes` leading sequences have one row."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def cu_seqlens_q(self) -> torch.Tensor: ...
    @property
    def seq_lens(self) -> torch.Tensor: ...
    @property
    def block_tables(self) -> torch.Tensor: ...
    @property
    def logits_indices(self) -> torch.Tensor: ...
    @property
    def num_decodes(self) -> int: ...


@dataclass(slots=True)
class _PlannedOp:
    struct: OpStruct
    input: PlannedRows | None
    output: PlannedRows
    residual: PlannedRows | None
    matrix: PackedMatrix | None
    keep: tuple[torch.Tensor, ...]  # owners of what the struct points to
    quantized: PlannedRows | None = None

    @property
    def read(self) -> list[PlannedRows]:
        return [rows for rows in (self.input, self.residual) if rows is not None]

    @property
    def written(self) -> list[PlannedRows]:
        return [rows for rows in (self.output, self.quantized) if rows is not None]

    def can_skip(self, rows: PlannedRows) -> bool:
        """Whether it needs no memory for `rows` where nobody reads them."""
        return rows is self.output and self.quantized is not None and self.struct.kind != Kind.LINEAR


class Plan:
    """The ops of a step in order; write it, then `prepare` it, then `run` it.

    Args:
        library: from `library.load`.
        max_tokens: rows of the largest step.
        max_logits: rows of logits of the largest step.
    """

    def __init__(self, library: ctypes.CDLL, max_tokens: int, max_logits: int) -> None:
        self.library = library
        self._max_tokens = max_tokens
        self._max_logits = max_logits
        self._ops: list[_PlannedOp] = []
        self._quantized: dict[tuple[int, RowFormat], PlannedRows] = {}
        self._arena = torch.empty(0)
        self._result = torch.empty(0)
        self._runner: int | None = None
        self._close: Callable[[], object] = lambda: None

    @property
    def matrices(self) -> list[tuple[PackedMatrix, bool]]:
        """Those that a step multiplies rows with, and whether only the rows whose logits are wanted."""
        linear = [op for op in self._ops if op.struct.kind == Kind.LINEAR]
        return [(op.matrix, op.output.is_for_logits) for op in linear if op.matrix is not None]

    def rows(self, columns: int, *, is_for_logits: bool = False, format: RowFormat = RowFormat.FLOAT32) -> PlannedRows:
        return PlannedRows(self, columns, is_for_logits, format)

    def add(
        self,
        kind: Kind,
        output: PlannedRows,
        *,
        input: PlannedRows | None = None,
        residual: PlannedRows | None = None,
        matrix: PackedMatrix | None = None,
        tensors: dict[str, torch.Tensor | None] | None = None,
        **numbers: float,
    ) -> PlannedRows:
        """Add an op that makes `output`. `tensors` go into the struct as pointers, `numbers` as they are."""
        struct = OpStruct(kind=int(kind), is_for_logits=output.is_for_logits, **numbers)
        if matrix is not None:
            struct.matrix = matrix.struct
        kept: list[torch.Tensor] = []
        for name, tensor in (tensors or {}).items():
            if tensor is not None:
                setattr(struct, name, tensor.data_ptr())
                kept.append(tensor)
        self._ops.append(_PlannedOp(struct, input, output, residual, matrix, tuple(kept)))
        return output

    def quantized(self, rows: PlannedRows, format: RowFormat) -> PlannedRows:
        """`rows` as a matrix of integers wants them; made once for all that ask, by the op that makes `rows` if it can.

        Raises:
            ValueError: they do not divide into groups.
        """
        if format == rows.format:
            return rows
        if rows.columns % GROUP:
            raise ValueError(f"rows of {rows.columns} are no multiple of {GROUP}")
        key = (id(rows), format)
        if key not in self._quantized:
            output = self.rows(rows.columns, is_for_logits=rows.is_for_logits, format=format)
            maker = next(op for op in reversed(self._ops) if op.output is rows)
            if maker.quantized is None and _can_quantize(maker.struct):
                maker.quantized = output
            else:
                self.add(Kind.QUANTIZE, output, input=rows)
            self._quantized[key] = output
        return self._quantized[key]

    def prepare(self, cache: torch.Tensor, num_threads: int, *, num_spins: int = DEFAULT_SPINS) -> None:
        """Give every row its place and start the threads; the last op's rows are what a step gives.

        Args:
            cache: the paged cache, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], or wider
                where heads are as `eight_bit_heads` says.
            num_threads: with the one that calls `run`.
        """
        result = self._ops[-1].output
        offsets, arena_bytes = self._lay_out()
        self._arena = torch.frombuffer(mmap.mmap(-1, arena_bytes + _ALIGNMENT), dtype=torch.uint8)
        base = -(-self._arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        structs = (OpStruct * len(self._ops))()
        for index, op in enumerate(self._ops):
            for name in ("input", "output", "residual", "quantized"):
                rows: PlannedRows | None = getattr(op, name)
                if rows is not None:
                    data = base + offsets[id(rows)] if id(rows) in offsets else None
                    setattr(op.struct, name, BufferStruct(data, rows.row_bytes, rows.columns, int(rows.format)))
            structs[index] = op.struct
        start = base - self._arena.data_ptr() + offsets[id(result)]
        place = self._arena[start : start + self._num_rows(result) * result.row_bytes]
        self._result = place.view(torch.float32).view(self._num_rows(result), -1)[:, : result.columns]
        element_bytes = cache.element_size()
        cache_struct = CacheStruct(
            block_bytes=cache.stride(0) * element_bytes,
            head_bytes=cache.stride(3) * element_bytes,
            block_size=cache.shape[4],
            format=int(KV_FORMATS[cache.dtype]),
        )
        self._runner = self.library.weir_runner_create(
            structs, len(self._ops), ctypes.byref(cache_struct), num_threads, num_spins
        )
        self._close = weakref.finalize(self, self.library.weir_runner_destroy, self._runner)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Compute a step; its tensors are on the CPU and contiguous.

        Returns:
            What the last op makes, float32 [num_logits, vocab_size] for a model; valid until the next step.
        """
        num_tokens, num_logits = batch.input_ids.shape[0], batch.logits_indices.shape[0]
        assert num_tokens <= self._max_tokens, f"{num_tokens} tokens, planned for {self._max_tokens}"
        assert num_logits <= self._max_logits, f"{num_logits} logits, planned for {self._max_logits}"
        struct = BatchStruct(
            input_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            logits_indices=batch.logits_indices.data_ptr(),
            table_stride=batch.block_tables.stride(0),
            num_tokens=num_tokens,
            num_seqs=batch.seq_lens.shape[0],
            num_logits=num_logits,
        )
        self.library.weir_runner_run(self._runner, ctypes.byref(struct))
        return self._result[: num_logits if self._ops[-1].output.is_for_logits else num_tokens]

    def sample(self, rows: Array[SampleRowStruct], num_scores: int) -> None:
        """Fill in the tokens of `rows`, each of `num_scores` scores; see `kernels.sample`."""
        self.library.weir_runner_sample(self._runner, rows, len(rows), num_scores)

    def close(self) -> None:
        """End the threads, which also end with the plan."""
        self._close()

    def _num_rows(self, rows: PlannedRows) -> int:
        return self._max_logits if rows.is_for_logits else self._max_tokens

    def _lay_out(self) -> tuple[dict[int, int], int]:
        """The offset of each row buffer, and the bytes of all: memory is used again after a buffer's last use."""
        last_use: dict[int, int] = {}
        for index, op in enumerate(self._ops):
            for rows in op.written:
                last_use.setdefault(id(rows), index)
            for rows in op.read:
                last_use[id(rows)] = index
        last_use[id(self._ops[-1].output)] = len(self._ops)
        offsets: dict[int, int] = {}
        sizes: dict[int, int] = {}
        free: list[tuple[int, int]] = []  # size, offset
        end = 0
        for index, op in enumerate(self._ops):
            for rows in op.written:
                if id(rows) in offsets or (op.can_skip(rows) and last_use[id(rows)] == index):
                    continue
                size = rows.row_bytes * self._num_rows(rows)
                fitting = [each for each in free if each[0] >= size]
                if fitting:
                    chosen = min(fitting)
                    free.remove(chosen)
                    sizes[id(rows)], offsets[id(rows)] = chosen
                else:
                    sizes[id(rows)], offsets[id(rows)] = size, end
                    end += size
            for rows in {id(each): each for each in (*op.read, *op.written)}.values():
                if last_use[id(rows)] == index and id(rows) in offsets:
                    free.append((sizes[id(rows)], offsets[id(rows)]))
        return offsets, end


def _can_quantize(struct: OpStruct) -> bool:
    """Whether the op can write its rows as integers, too."""
    if struct.kind == Kind.ATTENTION:
        return int(struct.head_dim) % GROUP == 0
    return struct.kind in (Kind.RMS_NORM, Kind.LINEAR)
