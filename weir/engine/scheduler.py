"""Decides who computes how many tokens in the next step, and who has to give way.

There is no prefill phase and no decode phase: a sequence has `num_computed_tokens`, and each step lets it catch up with
the tokens it has. The scheduler moves sequences between its queues and the KV cache manager; it sees no token's value.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from weir.core.block_hash import BlockHash
from weir.engine.kv_cache_manager import KvCacheManager
from weir.engine.sequence import Sequence, SequenceState
from weir.engine.sequence_queue import SequenceQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed tokens of a sequence, granted for one step.

    Attributes:
        start: position of the first of them.
        is_last: the step chooses the sequence's next token.
        is_built_on: another step may be launched on that token before it is known.
    """

    sequence: Sequence
    num_tokens: int
    start: int
    is_last: bool
    is_built_on: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step's work.

    Attributes:
        chunks: who computes; no sequence twice.
        admitted: who has left the waiting line and may compute from this step on.
        is_short: somebody was left out since nobody may be preempted while steps are under way.
    """

    chunks: tuple[ScheduledChunk, ...] = ()
    admitted: tuple[Sequence, ...] = ()
    is_short: bool = False


class Scheduler:
    """First come, first served within a priority; decodes first, then prompts under way, then waiting ones.

    A waiting sequence whose next block is being filled in this very step waits for the next one and finds it cached: so
    a prefix that many share is computed once, and nobody waits for work that does not move. The same is true of a block
    that is being loaded: whoever is admitted with a cold prefix has a seat and its blocks, and no turn before they are
    there.

    A sequence gets the blocks of all its known tokens when it is admitted, so only decoding can run out of blocks. Then
    the least urgent, newest sequence is preempted: it loses its blocks, keeps its tokens and is recomputed later. A
    prefill that serves a hand-off never grows, so it is never preempted; neither is a claim, an import or a load.

    A step may be scheduled while the one before it is still under way. Its sequences then count what was launched as
    computed and the tokens it will choose as late; nobody is preempted meanwhile, and the blocks of a sequence that
    ends are given back when the last step that writes them is over.

    Args:
        max_num_seqs: most sequences with a seat; running ones, loads, claims and imports have one.
        max_num_batched_tokens: most tokens of a step.

    Attributes:
        num_preemptions: so far.
        num_deferred: waiting sequences that the latest step put off for a prefix that it computes, or that is loaded.
    """

    def __init__(self, cache: KvCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting = SequenceQueue(lambda sequence: sequence.sort_key)
        self._running: list[Sequence] = []
        self._loading: dict[str, Sequence] = {}
        self._importing: dict[str, Sequence] = {}
        self._launched: set[ScheduledChunk] = set()
        self._num_waiting_tokens = 0
        self.num_preemptions = 0
        self.num_deferred = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_importing(self) -> int:
        """Claims and imports."""
        return len(self._importing)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens known and not computed, of waiting and loading sequences and of those that are still catching up."""
        uncomputed = (sequence.num_uncomputed_tokens for sequence in (*self._running, *self._loading.values()))
        return self._num_waiting_tokens + sum(count for count in uncomputed if count > 1)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.state = SequenceState.WAITING
        self._num_waiting_tokens += sequence.num_tokens
        self._waiting.push(sequence)

    def claim(self, sequence: Sequence) -> bool:
        """Promise a seat and blocks to a sequence whose KV comes from elsewhere; False when that can't be done now.

        A claim does not overtake a sequence that waits here and is as urgent: it would live on the blocks that the
        other waits for.
        """
        first = self._waiting.find_first()
        if first is not None and first.sort_key < sequence.sort_key:
            return False
        if self._num_seated >= self._max_num_seqs:
            return False
        match = self._cache.match(sequence, max_tokens=sequence.num_tokens)
        if not self._cache.claim(sequence, match, keep_watermark=self._num_seated > 0):
            return False
        sequence.state = SequenceState.CLAIMED
        sequence.num_cached_tokens = match.num_tokens
        self._importing[sequence.sequence_id] = sequence
        return True

    def start_import(self, sequence: Sequence) -> None:
        """Allocate what a claim promised; from now on a transfer may write the blocks that were not matched."""
        self._cache.allocate_claimed(sequence)
        sequence.state = SequenceState.IMPORTING

    def activate(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` tokens is in place: the sequence joins the next step."""
        del self._importing[sequence.sequence_id]
        sequence.num_computed_tokens = num_computed_tokens
        self._cache.publish(sequence)
        self._run(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """An import ends while a transfer may still write its blocks: it loses its seat and keeps the blocks."""
        del self._importing[sequence.sequence_id]
        sequence.state = SequenceState.ABANDONED

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in any state; its blocks are given back."""
        match sequence.state:
            case SequenceState.WAITING:
                self._num_waiting_tokens -= sequence.num_tokens
                self._waiting.discard(sequence)
            case SequenceState.RUNNING:
                self._unseat(sequence)
                if not sequence.num_launched_tokens:
                    self._cache.release(sequence)
            case SequenceState.LOADING:
                del self._loading[sequence.sequence_id]
                self._cache.release(sequence)
            case SequenceState.CLAIMED | SequenceState.IMPORTING:
                del self._importing[sequence.sequence_id]
                self._cache.release(sequence)
            case SequenceState.ABANDONED:
                self._cache.release(sequence)
            case SequenceState.ENDED:
                return
        sequence.state = SequenceState.ENDED

    def schedule(self) -> Schedule:
        """Choose the next step's work, admit and preempt. Its cost does not depend on how many sequences wait."""
        budget = self._max_num_batched_tokens
        chunks: list[ScheduledChunk] = []
        is_short = False
        admitted = self._join_loaded()
        for sequence in [s for s in self._running if s.num_uncomputed_tokens == 1]:
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue
            if self._grow(sequence):
                chunks.append(self._chunk(sequence, budget))
                budget -= 1
            else:
                is_short = bool(self._launched)
        for sequence in self._running:
            if budget == 0:
                break
            if sequence.num_uncomputed_tokens > 1:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].num_tokens
        if not is_short:
            admitted += self._admit(budget, chunks)
        return Schedule(chunks=tuple(chunks), admitted=tuple(admitted), is_short=is_short)

    def launch(self, chunk: ScheduledChunk) -> None:
        """A step that computes the chunk is under way."""
        self._launched.add(chunk)
        chunk.sequence.num_launched_tokens += chunk.num_tokens
        chunk.sequence.num_late_tokens += chunk.is_built_on

    def advance(self, chunk: ScheduledChunk) -> None:
        """A launched chunk's KV has been computed: count it and publish the blocks that it filled.

        The token that it chose, if it did, is the caller's to append.
        """
        self._land(chunk)
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        self._cache.publish(chunk.sequence)

    def retract(self, chunk: ScheduledChunk) -> None:
        """A launched chunk's step is over, and what came of it is not wanted, or nothing came of it."""
        self._land(chunk)
        sequence = chunk.sequence
        if sequence.state is SequenceState.ENDED and not sequence.num_launched_tokens:
            self._cache.release(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError: says which law is broken."""
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING, f"{sequence.sequence_id} runs as {sequence.state}"
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.sequence_id} has nothing to do"
        assert self._running == sorted(self._running, key=lambda s: s.sort_key), "running sequences are out of order"
        assert self._num_seated <= self._max_num_seqs, "more sequences have a seat than may"
        for sequence in self._loading.values():
            assert sequence.state is SequenceState.LOADING, f"{sequence.sequence_id} is loaded as {sequence.state}"
            assert sequence.load is not None, f"{sequence.sequence_id} waits for no load"
        seated = {*self._running, *self._loading.values(), *self._importing.values()}
        for owner in self._cache.owners():
            is_ending = owner.state is SequenceState.ABANDONED or (
                owner.state is SequenceState.ENDED and owner.num_launched_tokens > 0
            )
            assert is_ending or owner in seated, f"{owner.sequence_id} has blocks as {owner.state}"
            seated.discard(owner)
        assert not seated, f"{sorted(s.sequence_id for s in seated)} run without blocks"
        for sequence in {chunk.sequence for chunk in self._launched} | set(self._running):
            chunks = [chunk for chunk in self._launched if chunk.sequence is sequence]
            num_launched, num_late = sum(c.num_tokens for c in chunks), sum(c.is_built_on for c in chunks)
            assert sequence.num_launched_tokens == num_launched, f"{sequence.sequence_id}: launched tokens miscounted"
            assert sequence.num_late_tokens == num_late, f"{sequence.sequence_id}: late tokens are miscounted"
        self._cache.check_integrity()

    @property
    def _num_seated(self) -> int:
        return len(self._running) + len(self._loading) + len(self._importing)

    def _join_loaded(self) -> list[Sequence]:
        """Let those run whose cold blocks have come."""
        if self._cache.cold is not None:
            self._cache.cold.poll()
        joined = [sequence for sequence in self._loading.values() if self._cache.finish_load(sequence)]
        for sequence in joined:
            del self._loading[sequence.sequence_id]
            self._join(sequence)
        return joined

    def _join(self, sequence: Sequence) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        self._run(sequence)

    def _admit(self, budget: int, chunks: list[ScheduledChunk]) -> list[Sequence]:
        """Give waiting sequences seats and blocks while there are any, and add their chunks."""
        filling = {block_hash for chunk in (*self._launched, *chunks) for block_hash in self._filled_by(chunk)}
        filling.update(*(sequence.load.block_hashes for sequence in self._loading.values() if sequence.load))
        admitted: list[Sequence] = []
        deferred: list[Sequence] = []
        for _ in range(self._max_num_seqs):  # Also bounds how many are looked at in vain.
            sequence = self._waiting.find_first()
            if sequence is None or budget == 0 or self._num_seated >= self._max_num_seqs:
                break
            # The last known token is always computed: its logits choose the next one.
            max_tokens = sequence.num_tokens - 1
            match = self._cache.match(sequence, max_tokens=max_tokens)
            missing = sequence.block_hashes[len(match.block_ids) : max_tokens // self._cache.block_size]
            if missing and missing[0] in filling and not sequence.wants_prompt_logprobs:
                self._waiting.discard(sequence)
                deferred.append(sequence)
                continue
            keep_watermark = self._num_seated > 0 and not sequence.is_prefill_only
            if not self._cache.allocate(sequence, match, keep_watermark=keep_watermark):
                break
            self._waiting.discard(sequence)
            self._num_waiting_tokens -= sequence.num_tokens
            if not self._cache.finish_load(sequence):
                sequence.state = SequenceState.LOADING
                self._loading[sequence.sequence_id] = sequence
                filling.update(match.cold_hashes)
                continue
            self._join(sequence)
            admitted.append(sequence)
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].num_tokens
            filling.update(self._filled_by(chunks[-1]))
        for sequence in deferred:
            self._waiting.push(sequence)
        self.num_deferred = len(deferred)
        return admitted

    def _filled_by(self, chunk: ScheduledChunk) -> list[BlockHash]:
        """Hashes of the prompt blocks that the chunk will make full."""
        size = self._cache.block_size
        return chunk.sequence.block_hashes[chunk.start // size : chunk.end // size]

    def _grow(self, sequence: Sequence) -> bool:
        """Get the block for the next token, from less urgent sequences if need be; False if that was this one, or if
        nobody may be preempted now."""
        while not self._cache.grow(sequence):
            if self._launched:
                return False
            victim = next(s for s in reversed(self._running) if not s.is_prefill_only)
            self._unseat(victim)
            self._cache.release(victim)
            self.num_preemptions += 1
            self.add(victim)
            if victim is sequence:
                return False
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=lambda s: s.sort_key)

    def _land(self, chunk: ScheduledChunk) -> None:
        self._launched.remove(chunk)
        chunk.sequence.num_launched_tokens -= chunk.num_tokens
        chunk.sequence.num_late_tokens -= chunk.is_built_on

    def _unseat(self, sequence: Sequence) -> None:
        """Take a running sequence off its seat."""
        index = bisect_left(self._running, sequence.sort_key, key=lambda s: s.sort_key)
        assert self._running[index] is sequence
        del self._running[index]

    @staticmethod
    def _chunk(sequence: Sequence, budget: int) -> ScheduledChunk:
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        is_last = num_tokens == sequence.num_uncomputed_tokens
        return ScheduledChunk(
            sequence=sequence,
            num_tokens=num_tokens,
            start=sequence.num_computed_tokens + sequence.num_launched_tokens,
            is_last=is_last,
            is_built_on=is_last and sequence.can_run_ahead,
        )
