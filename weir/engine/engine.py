"""One model's loop: schedule, compute, update. Used by one thread; knows neither asyncio nor a network.

What happens to a sequence leaves as news for its reader, through `deliver`: at most twice a step.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

from weir.core.block_hash import BlockHash
from weir.core.deadline import Clock
from weir.core.errors import (
    ConflictError,
    DeadlineExceededError,
    RequestCancelledError,
    RequestNotFoundError,
    WeirError,
)
from weir.core.request import FirstToken, SequenceRequest
from weir.engine.claim import Denial, Grant, ImportTarget
from weir.engine.cold_blocks import ColdBlocks
from weir.engine.config import EngineConfig
from weir.engine.kv_cache_manager import KvCacheManager
from weir.engine.kv_events import KvEvents
from weir.engine.limits import EngineLimits
from weir.engine.outbox import Deliver, Outbox
from weir.engine.sampler import SampledToken
from weir.engine.scheduler import Scheduler
from weir.engine.sequence import PrefillChoice, Sequence, SequenceState, TokenEnd
from weir.engine.sequence_queue import SequenceQueue
from weir.engine.stats import EngineMeter, EngineStats
from weir.engine.step_computation import ChunkResult, LaunchedStep, Runner, StepComputation

DENIAL_RETRY_AFTER_S = 0.2


class Engine:
    """Every sequence of one model, from intake to its last token.

    An error of one sequence ends that sequence. An exception out of any method that is no `WeirError`, and any out of
    `step`, means that the engine itself is broken: then nothing more may be computed, see `fail_all`.

    Args:
        deliver: takes the news; called by the engine's own thread.
        cold: what is under the pool of KV blocks; None is nothing.
        clock: the one that deadlines are on.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        deliver: Deliver,
        cold: ColdBlocks | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.runner = runner
        self.meter = EngineMeter(clock())
        self._clock = clock
        self._outbox = Outbox(deliver, clock)
        self._limits = EngineLimits(
            vocab_size=runner.card.vocab_size,
            max_model_len=runner.max_model_len,
            num_blocks=runner.num_blocks,
            block_size=runner.layout.block_size,
        )
        if cold is not None:
            cold.token_s = self.meter.token_s
        self._cache = KvCacheManager(
            runner.num_blocks, runner.layout.block_size, enable_prefix_caching=config.enable_prefix_caching, cold=cold
        )
        self._scheduler = Scheduler(
            self._cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.token_budget()
        )
        self._computation = StepComputation(runner)
        self._step: LaunchedStep | None = None
        self._compute_share = 1.0 if runner.runs_ahead else config.compute_share  # a device shares no cores
        self._sequences: dict[str, Sequence] = {}
        self._hold_owners: dict[str, Sequence] = {}
        self._deadlines = SequenceQueue(lambda sequence: (sequence.request.deadline.at_s, sequence.arrival))
        self._num_arrivals = 0
        self.stats = EngineStats()
        self.update_stats()

    # Intake

    def submit(self, request: SequenceRequest, reader: Any) -> None:
        """Queue a sequence whose prompt is computed here.

        Raises:
            ConflictError: the sequence id is in use.
            InvalidRequestError: it can never run here; see `EngineLimits.check`.
        """
        self._scheduler.add(self._enter(request, reader))

    def prefill(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...], reader: Any) -> None:
        """Queue a prompt that is computed once for all `choices`, each of which gets a hold and a first token.

        Raises:
            ConflictError: the sequence id or a hold id is in use.
            InvalidRequestError: it can never run here; see `EngineLimits.check`.
        """
        assert choices, "a prefill without choices"
        for choice in choices:
            if choice.hold_id in self._hold_owners or self._cache.has_hold(choice.hold_id):
                raise ConflictError(f"hold {choice.hold_id!r} exists")
        sequence = self._enter(request, reader, choices=choices)
        self._hold_owners.update(dict.fromkeys(sequence.hold_ids, sequence))
        self._scheduler.add(sequence)

    def claim(self, request: SequenceRequest, reader: Any) -> Grant | Denial:
        """Promise a seat and blocks to a sequence whose KV another worker computes.

        Raises:
            ConflictError: the sequence id is in use.
            InvalidRequestError: it can never run here; see `EngineLimits.check`.
        """
        sequence = self._enter(request, reader)
        # Whoever computes the prompt gives its log-probabilities.
        sequence.num_prompt_logprobs = sequence.num_prompt_tokens
        if not self._scheduler.claim(sequence):
            self._forget(sequence)
            return Denial(retry_after_s=DENIAL_RETRY_AFTER_S)
        return Grant(num_cached_tokens=sequence.num_computed_tokens, num_claimed_blocks=sequence.num_claimed_blocks)

    # From claim to running

    def allocate_claimed(self, sequence_id: str) -> ImportTarget:
        """Turn a claim into blocks to write to.

        Raises:
            RequestNotFoundError: the claim has ended.
            ConflictError: it is no claim any more.
        """
        sequence = self._get(sequence_id, SequenceState.CLAIMED)
        self._scheduler.start_import(sequence)
        num_blocks = self._cache.blocks_for(sequence.num_tokens)
        return ImportTarget(
            num_cached_tokens=sequence.num_computed_tokens, block_ids=tuple(sequence.block_ids[:num_blocks])
        )

    def activate(self, sequence_id: str, first_token: FirstToken, num_cached_tokens: int) -> None:
        """The KV of all known tokens is in place and nobody writes the blocks any more: join the next step.

        Args:
            num_cached_tokens: prompt tokens that a prefix hit gave where the prompt was computed.

        Raises:
            RequestCancelledError, DeadlineExceededError: it ended meanwhile; its blocks are free now.
            RequestNotFoundError, ConflictError: it is no import.
        """
        known = self._sequences.get(sequence_id)
        if known is not None and known.error is not None:
            self.release_claim(sequence_id)
            raise known.error
        sequence = self._get(sequence_id, SequenceState.IMPORTING)
        num_known_tokens = sequence.num_tokens
        sequence.num_cached_tokens = num_cached_tokens
        sequence.append(first_token.token_id)
        self._scheduler.activate(sequence, num_known_tokens)
        self.meter.num_imported_tokens += sequence.num_prompt_tokens
        end = TokenEnd(finish_reason=first_token.finish_reason, stop_token_id=first_token.stop_token_id)
        self._emit_token(sequence, SampledToken(token_id=first_token.token_id, logprobs=first_token.logprobs), end)

    def release_claim(self, sequence_id: str) -> None:
        """Give up a claim or an import whose blocks nobody writes any more. Unknown ids are ignored.

        Raises:
            ConflictError: it has been activated, or never was a claim.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state not in (SequenceState.CLAIMED, SequenceState.IMPORTING, SequenceState.ABANDONED):
            raise ConflictError(f"sequence {sequence_id!r} is {sequence.state.value} and has no claim")
        self._end(sequence)

    # Endings

    def abort(self, sequence_id: str) -> None:
        """End a sequence in any state, without news. Unknown ids are ignored.

        The blocks of an import stay until `release_claim` or `activate` says that nobody writes them any more.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._interrupt(sequence, RequestCancelledError(f"sequence {sequence_id!r} was aborted"))

    def release_hold(self, hold_id: str) -> None:
        """End the hold of one choice, whether its prefill waits, runs or is over. Unknown ids are ignored."""
        self._cache.release_hold(hold_id)
        sequence = self._hold_owners.pop(hold_id, None)
        if sequence is not None:
            sequence.hold_ids.remove(hold_id)

    def fail_all(self, error: WeirError) -> None:
        """The engine cannot go on: every sequence ends with `error`, and `stats` says why. No block is given back."""
        self.meter.failure = error.message
        for sequence in self._sequences.values():
            if sequence.state is not SequenceState.ABANDONED:
                self._outbox.put_error(sequence, error)
        self._sequences.clear()
        self._step = None
        self.meter.rest()
        self.update_stats()
        self.flush()

    # The loop

    def step(self) -> bool:
        """One round for everybody: launch a step, then take the results of the one before, or of this one where the
        runner does not run ahead. False when nothing could be computed: only commands and loads can change that.
        """
        self._expire()
        schedule = self._scheduler.schedule()
        for sequence in schedule.admitted:
            self._note_admitted(sequence)
        previous, self._step = self._step, None
        if not schedule.chunks and previous is None:
            self.meter.rest()
            self.update_stats()
            self.flush()
            return False
        self.meter.start_step(self._clock())
        self.update_stats()
        self.flush()
        if schedule.chunks:
            for chunk in schedule.chunks:
                self._scheduler.launch(chunk)
            self._step = self._computation.launch(schedule.chunks, after=previous)
        if previous is not None:
            self._collect(previous)
        if self._step is not None and (not self.runner.runs_ahead or schedule.is_short):
            step, self._step = self._step, None
            self._collect(step)
        return True

    @property
    def is_loading(self) -> bool:
        """Cold blocks are on their way, for which somebody waits."""
        return self._scheduler.num_loading > 0

    def rest_s(self) -> float:
        """How long to leave the cores to those who compute KV for sequences here."""
        return self.meter.rest_s(self._compute_share) if self._scheduler.num_importing else 0.0

    def flush(self) -> None:
        """Deliver the news that commands or a step left behind."""
        self._outbox.flush()

    def seconds_to_deadline(self) -> float | None:
        """Until the next deadline of any sequence; None when none has one."""
        first = self._deadlines.find_first()
        return None if first is None else first.request.deadline.remaining_s(self._clock)

    # The prefix cache

    @property
    def has_kv_events(self) -> bool:
        return self._cache.pool.has_events

    def take_kv_events(self) -> KvEvents:
        return self._cache.pool.take_events()

    def restart_kv_events(self) -> None:
        """The reader lost what it took: its next events start from the whole content."""
        self._cache.pool.restart_events()

    def kv_snapshot(self) -> tuple[BlockHash, ...]:
        return self._cache.pool.content()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while any block is in use."""
        return self._cache.pool.forget_all()

    # What it says of itself

    def update_stats(self) -> None:
        """Replace the snapshot `stats`."""
        self.stats = EngineStats.of(self._scheduler, self._cache, self.meter)

    def check_integrity(self) -> None:
        """Costs a walk of the whole pool.

        Raises:
            AssertionError: says which law is broken.
        """
        states = [sequence.state for sequence in self._sequences.values()]
        assert SequenceState.ENDED not in states, "an ended sequence is remembered"
        assert states.count(SequenceState.WAITING) == self._scheduler.num_waiting, "waiting sequences are miscounted"
        assert states.count(SequenceState.LOADING) == self._scheduler.num_loading, "loading sequences are miscounted"
        assert states.count(SequenceState.RUNNING) == self._scheduler.num_running, "running sequences are miscounted"
        for hold_id, sequence in self._hold_owners.items():
            assert hold_id in sequence.hold_ids, f"hold {hold_id} is not of {sequence.sequence_id}"
            assert self._sequences.get(sequence.sequence_id) is sequence, f"hold {hold_id} has no sequence"
        self._scheduler.check_integrity()

    def _enter(self, request: SequenceRequest, reader: Any, *, choices: tuple[PrefillChoice, ...] = ()) -> Sequence:
        if request.sequence_id in self._sequences:
            raise ConflictError(f"sequence {request.sequence_id!r} exists")
        self._limits.check(request, is_prefill_only=bool(choices))
        self._num_arrivals += 1
        sequence = Sequence(
            request,
            arrival=self._num_arrivals,
            arrived_s=self._clock(),
            eos_token_ids=self.runner.card.eos_token_ids,
            choices=choices,
            reader=reader,
        )
        self._sequences[sequence.sequence_id] = sequence
        if request.deadline.at_s != math.inf:
            self._deadlines.push(sequence)
        return sequence

    def _get(self, sequence_id: str, state: SequenceState) -> Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise RequestNotFoundError(f"sequence {sequence_id!r} is unknown or has ended")
        if sequence.error is not None:
            raise sequence.error
        if sequence.state is not state:
            raise ConflictError(f"sequence {sequence_id!r} is {sequence.state.value}, not {state.value}")
        return sequence

    def _expire(self) -> None:
        now = self._clock()
        while (sequence := self._deadlines.find_first()) is not None and sequence.request.deadline.at_s <= now:
            self._interrupt(sequence, DeadlineExceededError("the deadline has passed"), tells_reader=True)

    def _interrupt(self, sequence: Sequence, error: WeirError, *, tells_reader: bool = False) -> None:
        """End a sequence before its time; the blocks of an import are kept for its writer."""
        if sequence.state is SequenceState.ABANDONED:
            return
        if tells_reader:
            self._outbox.put_error(sequence, error)
        if sequence.state is SequenceState.IMPORTING:
            self._scheduler.abandon(sequence)
            self._deadlines.discard(sequence)
            sequence.error = error
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        self._deadlines.discard(sequence)
        for hold_id in sequence.hold_ids:
            del self._hold_owners[hold_id]

    def _note_admitted(self, sequence: Sequence) -> None:
        """Count a first admission; a prefill's cached blocks can leave before anything is computed."""
        if sequence.admitted_s is not None:
            return  # back from a preemption
        sequence.admitted_s = self._clock()
        num_cached_tokens = min(sequence.num_cached_tokens or 0, sequence.num_prompt_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        self.meter.num_prompt_tokens += sequence.num_prompt_tokens
        if self._cache.enable_prefix_caching:
            self.meter.prefix_cache_queries += sequence.num_prompt_tokens
            self.meter.prefix_cache_hits += num_cached_tokens
        if sequence.is_prefill_only and sequence.num_computed_tokens:
            self._outbox.put_progress(sequence)

    def _collect(self, step: LaunchedStep) -> None:
        """Take the results of the oldest step under way."""
        results = self._computation.collect(step, self._cancel_step)
        for chunk, result in zip(step.chunks, results, strict=True):
            if chunk.sequence.state is not SequenceState.RUNNING:  # it ended meanwhile
                self._scheduler.retract(chunk)
            elif result.error is not None:
                self._scheduler.retract(chunk)
                self._interrupt(chunk.sequence, result.error, tells_reader=True)
            else:
                self._scheduler.advance(chunk)
                self._apply(chunk.sequence, result)
        self.meter.end_step(self._clock(), num_tokens=sum(chunk.num_tokens for chunk in step.chunks))
        self.update_stats()
        self.flush()

    def _cancel_step(self) -> None:
        """The step under way builds on one that failed: wait for its end and take it back."""
        step, self._step = self._step, None
        if step is not None:
            with suppress(Exception):  # it is not wanted, whatever came of it
                step.collect()
            for chunk in step.chunks:
                self._scheduler.retract(chunk)

    def _apply(self, sequence: Sequence, result: ChunkResult) -> None:
        sequence.prompt_logprobs.extend(result.prompt_logprobs)
        sequence.num_prompt_logprobs += len(result.prompt_logprobs)
        self.meter.num_generation_tokens += len(result.tokens)
        if sequence.is_prefill_only:
            if result.tokens:
                self._outbox.put_first_tokens(sequence, result.tokens)
                self._end(sequence)
            else:
                self._outbox.put_progress(sequence)
        elif result.tokens:
            (token,) = result.tokens
            end = sequence.end_of(token.token_id)
            sequence.append(token.token_id)
            self._emit_token(sequence, token, end)

    def _emit_token(self, sequence: Sequence, token: SampledToken, end: TokenEnd) -> None:
        """Tell the reader of the token just appended; the sequence ends if it was the last."""
        self._outbox.put_token(sequence, token, end)
        if end.finish_reason is not None:
            self._end(sequence)
