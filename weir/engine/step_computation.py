"""Runs steps' chunks through the model and the sampler. It changes no sequence: what came out is returned.

A step is launched, and its results are taken later: on a GPU the next one can be launched in between, on tokens that
only the device knows yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from kernels.cpu.plan import Plan
from weir.core.errors import HopFailedError
from weir.core.kv_layout import KvLayout
from weir.core.model_card import ModelCard
from weir.core.request import TokenLogprobs
from weir.engine.batch import ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.logprobs import PendingLogprobs, launch_logprobs
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.sampler import PendingTokens, SampledToken, SamplingRow, launch_sampling
from weir.engine.scheduler import ScheduledChunk
from weir.engine.sequence import Sequence as EngineSequence

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
    runs_ahead: bool

    def execute(self, items: Sequence[ScheduledSequence], chosen: torch.Tensor | None = None) -> torch.Tensor: ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step under way.

    Attributes:
        tokens: what it chooses, for `rows`; None if it could not be launched, for the reason `error`.
        prompt_logprobs: of each chunk.
        sources: where among its tokens that of a sequence is.
    """

    chunks: Sequence[ScheduledChunk]
    tokens: PendingTokens | None = None
    prompt_logprobs: tuple[PendingLogprobs | None, ...] = ()
    sources: Mapping[EngineSequence, int] = field(default_factory=dict)
    error: Exception | None = None

    def collect(self) -> list[ChunkResult]:
        """Wait for its results, one for each chunk. Raises whatever kept it from having them."""
        if self.error is not None:
            raise self.error
        assert self.tokens is not None
        tokens = iter(self.tokens.collect())
        return [
            ChunkResult(
                tokens=tuple(next(tokens) for _ in range(_num_choices(chunk))) if chunk.is_last else (),
                prompt_logprobs=() if logprobs is None else logprobs.collect(),
            )
            for chunk, logprobs in zip(self.chunks, self.prompt_logprobs, strict=True)
        ]


class StepComputation:
    """Launches and collects steps; a chunk that makes the model or the sampler fail fails alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_failed_steps = 0

    def launch(self, chunks: Sequence[ScheduledChunk], after: LaunchedStep | None = None) -> LaunchedStep:
        """Begin to compute `chunks`; what goes wrong is said when the step is collected.

        Args:
            after: the step under way that chooses tokens which chunks here begin with.
        """
        try:
            return self._launch(chunks, after)
        except Exception as exc:  # noqa: BLE001 - raised and logged when it is collected
            return LaunchedStep(chunks=chunks, error=exc)

    def collect(self, step: LaunchedStep, cancel_next: Callable[[], None]) -> list[ChunkResult]:
        """One result for each chunk of the oldest step under way.

        Args:
            cancel_next: called before chunks are computed once more: takes back what was launched after them.

        Raises:
            HopFailedError: nothing could be computed in `MAX_FAILED_STEPS` steps in a row, nor a token that was asked
                for by nobody: the model is broken.
        """
        try:
            results = step.collect()
        except Exception as exc:  # noqa: BLE001 - logged there
            cancel_next()
            results = self._isolate(step.chunks, exc)
        if any(result.error is None for result in results):
            self._num_failed_steps = 0
            return results
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            if not self._can_compute_in(step.chunks[0]):
                raise HopFailedError(f"nothing could be computed in {MAX_FAILED_STEPS} steps in a row")
            self._num_failed_steps = 0
        return results

    def _can_compute_in(self, failed: ScheduledChunk) -> bool:
        """Whether an ordinary token goes where this chunk's first should have gone; nobody will read it there."""
        probe = replace(_to_scheduled(failed), token_ids=(0,), num_logits=1)
        try:
            return bool(self._runner.execute([probe]).isfinite().all())
        except Exception:
            logger.exception("the model computes nothing any more")
            return False

    def _isolate(self, chunks: Sequence[ScheduledChunk], failure: Exception) -> list[ChunkResult]:
        """Compute the chunks of a step that failed once more, each alone."""
        if len(chunks) == 1:
            sequence = chunks[0].sequence
            logger.error(
                "a sequence could not be computed", exc_info=failure, extra={"sequence_id": sequence.sequence_id}
            )
            error = HopFailedError(
                f"the model could not compute this sequence: {type(failure).__name__}",
                hop="prefill" if sequence.is_prefill_only else "decode",
            )
            return [ChunkResult(error=error)]
        logger.warning("a step of %d sequences failed; each is tried alone", len(chunks), exc_info=failure)
        # Computing a chunk again writes the same KV to the same slots, and a draw depends on nothing that has moved.
        results: list[ChunkResult] = []
        for chunk in chunks:
            try:
                results.extend(self._launch([chunk]).collect())
            except Exception as exc:  # noqa: BLE001 - logged there
                results.extend(self._isolate([chunk], exc))
        return results

    def _launch(self, chunks: Sequence[ScheduledChunk], after: LaunchedStep | None = None) -> LaunchedStep:
        items = [_to_scheduled(chunk, after) for chunk in chunks]
        chosen = None if after is None or after.tokens is None else after.tokens.token_ids
        logits = self._runner.execute(items, chosen)
        rows: list[SamplingRow] = []
        sources: dict[EngineSequence, int] = {}
        prompt_logprobs: list[PendingLogprobs | None] = []
        end = 0
        for chunk, item in zip(chunks, items, strict=True):
            end += item.num_logits
            if chunk.is_last:
                sources[chunk.sequence] = len(rows)
                rows.extend(_sampling_rows(chunk, logits_row=end - 1))
            prompt_logprobs.append(_prompt_logprobs(chunk, logits[end - item.num_logits : end]))
        return LaunchedStep(
            chunks=chunks,
            tokens=launch_sampling(logits, rows, self._runner.plan),
            prompt_logprobs=tuple(prompt_logprobs),
            sources=sources,
        )


def _num_choices(chunk: ScheduledChunk) -> int:
    return max(1, len(chunk.sequence.choices))


def _to_scheduled(chunk: ScheduledChunk, after: LaunchedStep | None = None) -> ScheduledSequence:
    sequence = chunk.sequence
    late_source = None
    token_ids = tuple(sequence.token_ids[chunk.start : chunk.end])
    if not token_ids:
        assert after is not None, "a late token of no step"
        token_ids, late_source = (0,), after.sources[sequence]
    if sequence.wants_prompt_logprobs and chunk.end > sequence.num_prompt_logprobs:
        num_logits = chunk.num_tokens
    else:
        num_logits = int(chunk.is_last)
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        token_ids=token_ids,
        start=chunk.start,
        block_ids=sequence.block_ids,
        num_logits=num_logits,
        late_source=late_source,
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
            position=chunk.end,
            output_counts=sequence.output_counts,
            stop_token_ids=sequence.stop_token_ids,
        )
        for choice_index in indices
    ]


def _prompt_logprobs(chunk: ScheduledChunk, logits: torch.Tensor) -> PendingLogprobs | None:
    """The logits of position p say how likely the prompt's token p + 1 was."""
    sequence = chunk.sequence
    if not sequence.wants_prompt_logprobs:
        return None
    first = max(chunk.start, sequence.num_prompt_logprobs)
    stop = min(chunk.end, sequence.num_prompt_tokens - 1)
    if first >= stop:
        return None
    targets = sequence.token_ids[first + 1 : stop + 1]
    num_top = [sequence.sampling.prompt_logprobs or 0] * len(targets)
    return launch_logprobs(logits[first - chunk.start : stop - chunk.start], targets, num_top)
