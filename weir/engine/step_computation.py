"""Runs one step's chunks through the model and the sampler. It changes no sequence: what came out is returned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kernels.cpu.plan import Plan
from weir.core.errors import HopFailedError
from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.core.request import TokenLogprobs
from weir.engine.batch import Batch, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.logprobs import PendingLogprobs, launch_logprobs
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.sampler import SampledToken, SamplingRow, launch_sampling
from weir.engine.scheduler import ScheduledChunk

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class Runner(Protocol):
    """What the engine needs of a model: `weir.engine.model_runner.ModelRunner`, or a fake without weights."""

    card: ModelCard
    weights_hash: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    cache: PagedKvCache
    plan: Plan | None

    def execute(self, batch: Batch) -> torch.Tensor: ...

    def warm_up(self) -> None: ...


def load_model_runner(config: EngineConfig) -> Runner:
    """The real model. Imported late: whoever brings another runner needs no weights.

    Raises:
        ModelLoadError, ConfigError: see `ModelRunner`.
    """
    from weir.engine.model_runner import ModelRunner

    return ModelRunner(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """What came of one chunk.

    Attributes:
        tokens: one for each choice when the chunk reached the end of the known tokens, else empty.
        prompt_logprobs: of the prompt positions that the chunk gave and nobody had yet.
        error: the chunk could not be computed; its KV is not in place.
    """

    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: HopFailedError | None = None


class StepComputation:
    """Executes chunks; one that makes the model or the sampler fail fails alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_failed_steps = 0

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[ChunkResult]:
        """One result for each chunk.

        Raises:
            HopFailedError: nothing could be computed in `MAX_FAILED_STEPS` steps in a row, nor a token that was asked
                for by nobody: the model is broken.
        """
        results = self._run_isolated(chunks)
        if any(result.error is None for result in results):
            self._num_failed_steps = 0
            return results
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            if not self._can_compute_in(chunks[0]):
                raise HopFailedError(f"nothing could be computed in {MAX_FAILED_STEPS} steps in a row")
            self._num_failed_steps = 0
        return results

    def _can_compute_in(self, failed: ScheduledChunk) -> bool:
        """Whether an ordinary token goes where this chunk's first should have gone; nobody will read it there."""
        probe = replace(_to_scheduled(failed), token_ids=(0,), num_logits=1)
        cache = self._runner.cache
        try:
            batch = Batch.from_scheduled([probe], cache.layout.block_size, cache.tensor.device)
            return bool(self._runner.execute(batch).isfinite().all())
        except Exception:
            logger.exception("the model computes nothing any more")
            return False

    def _run_isolated(self, chunks: Sequence[ScheduledChunk]) -> list[ChunkResult]:
        try:
            return self._execute(chunks)
        except Exception as exc:
            if len(chunks) == 1:
                sequence = chunks[0].sequence
                logger.exception("a sequence could not be computed", extra={"sequence_id": sequence.sequence_id})
                error = HopFailedError(
                    f"the model could not compute this sequence: {type(exc).__name__}",
                    hop="prefill" if sequence.is_prefill_only else "decode",
                )
                return [ChunkResult(error=error)]
            logger.warning("a step of %d sequences failed; each is tried alone", len(chunks), exc_info=True)
        # Computing a chunk again writes the same KV to the same slots, and a draw depends on nothing that has moved.
        return [result for chunk in chunks for result in self._run_isolated([chunk])]

    def _execute(self, chunks: Sequence[ScheduledChunk]) -> list[ChunkResult]:
        items = [_to_scheduled(chunk) for chunk in chunks]
        cache = self._runner.cache
        batch = Batch.from_scheduled(items, cache.layout.block_size, cache.tensor.device)
        logits = self._runner.execute(batch)
        rows: list[SamplingRow] = []
        prompt_logprobs: list[PendingLogprobs | None] = []
        end = 0
        for chunk, item in zip(chunks, items, strict=True):
            end += item.num_logits
            if item.end == chunk.sequence.num_tokens:
                rows.extend(_sampling_rows(chunk, logits_row=end - 1))
            prompt_logprobs.append(_launch_prompt_logprobs(chunk, logits[end - item.num_logits : end]))
        pending = launch_sampling(logits, rows, self._runner.plan)
        tokens = iter(pending.collect())
        return [
            ChunkResult(
                tokens=tuple(next(tokens) for _ in range(_num_choices(chunk))) if _is_last(chunk) else (),
                prompt_logprobs=() if found is None else found.collect(),
            )
            for chunk, found in zip(chunks, prompt_logprobs, strict=True)
        ]


def _is_last(chunk: ScheduledChunk) -> bool:
    return chunk.num_tokens == chunk.sequence.num_uncomputed_tokens


def _num_choices(chunk: ScheduledChunk) -> int:
    return max(1, len(chunk.sequence.choices))


def _to_scheduled(chunk: ScheduledChunk) -> ScheduledSequence:
    sequence = chunk.sequence
    start = sequence.num_computed_tokens
    end = start + chunk.num_tokens
    if sequence.wants_prompt_logprobs and end > sequence.num_prompt_logprobs:
        num_logits = chunk.num_tokens
    else:
        num_logits = int(_is_last(chunk))
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.token_ids[start:end]),
        start=start,
        block_ids=sequence.block_ids,
        num_logits=num_logits,
    )


def _sampling_rows(chunk: ScheduledChunk, *, logits_row: int) -> list[SamplingRow]:
    sequence = chunk.sequence
    indices = [choice.choice_index for choice in sequence.choices] or [sequence.request.choice_index]
    return [
        SamplingRow(
            logits_row=logits_row,
            params=sequence.sampling,
            choice_index=choice_index,
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            output_counts=sequence.output_counts,
            stop_token_ids=sequence.stop_token_ids,
        )
        for choice_index in indices
    ]


def _launch_prompt_logprobs(chunk: ScheduledChunk, logits: torch.Tensor) -> PendingLogprobs | None:
    """The logits of position p say how likely the prompt's token p + 1 was."""
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return None
    start = sequence.num_computed_tokens
    first = max(start, sequence.num_prompt_logprobs)
    stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    if first >= stop:
        return None
    targets = sequence.token_ids[first + 1 : stop + 1]
    num_top = [sequence.sampling.prompt_logprobs or 0] * len(targets)
    return launch_logprobs(logits[first - start : stop - start], targets, num_top)
