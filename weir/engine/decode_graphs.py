"""Decode steps as recorded graphs, one for each size of batch, so that a step costs the host one launch.

A batch goes into the smallest graph that holds it. Rows of padding are sequences of no length whose slot is -1: they
store nothing, see nothing, and nobody reads their logits. Graphs read their batch where it lay when they were recorded.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from weir.engine.batch import Batch, BatchArrays
from weir.engine.staging import Staging

logger = logging.getLogger(__name__)

MAX_GRAPH_SEQS = 512
_SEQUENCE_BYTES = 256
"""More than a sequence's part of a batch takes beside its table."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded computation: `replay` runs it on whatever its inputs hold now and refills `output`."""

    replay: Callable[[], None]
    output: torch.Tensor


class Recorder(Protocol):
    """Records computations: `CudaRecorder`, or a fake that computes anew at each replay."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Recording: ...


class CudaRecorder:
    """CUDA graphs that share their memory: an output is valid until any of them is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, compute: Callable[[], torch.Tensor]) -> Recording:
        # What happens at a first launch (compilation, choice of algorithms, workspaces) can't be recorded.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return Recording(graph.replay, output)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sequences that graphs are recorded for: 1, 2, 4, then multiples of 8, up to `max_num_seqs` or a limit."""
    largest = min(max_num_seqs, MAX_GRAPH_SEQS)
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


class DecodeGraphs:
    """All graphs of one model.

    Args:
        compute: the model: logits [num_logits, vocab_size] of a batch of decoding sequences.
        sizes: sequences of each graph, ascending.
        max_blocks: blocks of the longest sequence.
        device: where the batches are computed.
    """

    def __init__(
        self,
        compute: Callable[[Batch], torch.Tensor],
        recorder: Recorder,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
    ) -> None:
        started_s = time.monotonic()
        self._sizes = list(sizes)
        self._staging = Staging(device)
        self._tables = torch.zeros((sizes[-1], max_blocks), dtype=torch.int32, device=device)
        self._memory = torch.zeros(_SEQUENCE_BYTES * sizes[-1] + self._tables.nbytes, dtype=torch.uint8, device=device)
        self._recordings: dict[int, Recording] = {}
        # The largest first: the others fit into its memory.
        for size in tqdm(sorted(sizes, reverse=True), desc="recording decode graphs", unit="graph", disable=None):
            batch = self._send(_padding(size), size)
            self._recordings[size] = recorder.record(lambda batch=batch: compute(batch))  # type: ignore[misc]
        logger.info(
            "decode graphs recorded",
            extra={"num_graphs": len(sizes), "max_seqs": sizes[-1], "seconds": round(time.monotonic() - started_s, 3)},
        )

    def fits(self, arrays: BatchArrays) -> bool:
        """Whether the batch decodes alone and a graph is large enough."""
        return arrays.num_decodes == arrays.num_seqs <= self._sizes[-1]

    def run(self, arrays: BatchArrays, chosen: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_logits, vocab_size] of a batch that fits, valid until the next call.

        Args:
            chosen: the tokens that the previous step chose, where `arrays` has late rows.
        """
        size = self._sizes[bisect_left(self._sizes, arrays.num_seqs)]
        self._send(arrays, size, chosen)
        recording = self._recordings[size]
        recording.replay()
        return recording.output[: len(arrays.logits_indices)]

    def _send(self, arrays: BatchArrays, size: int, chosen: torch.Tensor | None = None) -> Batch:
        """The batch padded to `size` sequences, where the graph of that size reads it."""
        num_missing = size - arrays.num_seqs
        padded = dataclasses.replace(
            arrays,
            input_ids=np.pad(arrays.input_ids, (0, num_missing)),
            positions=np.pad(arrays.positions, (0, num_missing)),
            slots=np.pad(arrays.slots, (0, num_missing), constant_values=-1),
            cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
            seq_lens=np.pad(arrays.seq_lens, (0, num_missing)),
            logits_indices=np.pad(arrays.logits_indices, (0, size - len(arrays.logits_indices))),
            num_decodes=size,
        )
        batch = Batch.on_device(padded, self._staging, chosen, into=self._memory)
        num_seqs, num_blocks = batch.block_tables.shape
        self._tables[:num_seqs, :num_blocks].copy_(batch.block_tables)
        return dataclasses.replace(batch, block_tables=self._tables[:size])


def _padding(size: int) -> BatchArrays:
    """A batch of padding alone."""
    none = np.zeros(0, dtype=np.int64)
    return BatchArrays(
        input_ids=np.zeros(size, dtype=np.int64),
        positions=np.zeros(size, dtype=np.int64),
        slots=np.full(size, -1, dtype=np.int64),
        cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.zeros(size, dtype=np.int32),
        block_tables=np.zeros((size, 1), dtype=np.int32),
        logits_indices=np.arange(size, dtype=np.int64),
        num_decodes=size,
        late_rows=none,
        late_sources=none,
    )
