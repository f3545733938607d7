"""What an engine says of itself: counters while it works, and a snapshot that any thread may read."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.engine.kv_cache_manager import KvCacheManager
    from weir.engine.scheduler import Scheduler

NUM_RECENT_STEPS = 64
NUM_LATEST_STEPS = 8
MAX_RESTED_STEP_S = 0.08
"""A rest does not stretch a step beyond this: faster than people read, and within usual limits of time per token."""
NUM_KEPT_ITERATIONS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier of memory under the KV pool. Counters grow for the engine's life.

    Attributes:
        num_blocks, num_used_blocks: its size, and how many blocks can be found there.
        num_saved_blocks: that have come into it from above.
        num_hit_tokens: brought back into the pool instead of being computed.
    """

    num_blocks: int = 0
    num_used_blocks: int = 0
    num_saved_blocks: int = 0
    num_hit_tokens: int = 0

    @property
    def usage(self) -> float:
        """Share of the blocks that hold something, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine after its latest step or command. Counters grow for the engine's life.

    Attributes:
        num_running: sequences with a seat that compute.
        num_waiting: sequences that wait to be admitted.
        num_deferred: those that the latest step put off for a prefix that it computed.
        num_loading: those that have a seat and wait for cold blocks of theirs; they are not in `num_waiting`.
        num_importing: claims and imports; they have seats too.
        queued_tokens: tokens known and not computed yet.
        free_blocks: blocks that are neither referenced nor promised.
        held_blocks: different blocks under holds.
        num_holds: holds that have not been released.
        host, disk: what is under the pool.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up for sequences computed here, and found in any
            tier.
        num_prompt_tokens: prompt tokens of sequences computed here, cached ones included.
        num_imported_tokens: prompt tokens whose KV another worker computed.
        num_generation_tokens: output tokens chosen here.
        num_steps: steps that computed something.
        has_work: a step is under way or due; an engine whose sequences all wait for blocks has none.
        last_step_ended_s: on the engine's monotonic clock; when the engine last left idleness, if that is later.
        longest_recent_step_s: of the latest 64 steps.
        failure: why the engine cannot go on; None while it lives.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_loading: int = 0
    num_importing: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    held_blocks: int = 0
    num_holds: int = 0
    host: TierStats = TierStats()
    disk: TierStats = TierStats()
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_prompt_tokens: int = 0
    num_imported_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    has_work: bool = False
    last_step_ended_s: float = 0.0
    longest_recent_step_s: float = 0.0
    failure: str | None = None

    @classmethod
    def of(cls, scheduler: Scheduler, cache: KvCacheManager, meter: EngineMeter) -> EngineStats:
        """The engine as it is now."""
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_deferred=scheduler.num_deferred,
            num_loading=scheduler.num_loading,
            num_importing=scheduler.num_importing,
            queued_tokens=scheduler.num_queued_tokens,
            free_blocks=cache.num_available_blocks,
            total_blocks=cache.pool.num_blocks,
            held_blocks=cache.num_held_blocks,
            num_holds=cache.num_holds,
            host=cache.cold.host_stats() if cache.cold is not None else TierStats(),
            disk=cache.cold.disk_stats() if cache.cold is not None else TierStats(),
            prefix_cache_queries=meter.prefix_cache_queries,
            prefix_cache_hits=meter.prefix_cache_hits,
            num_prompt_tokens=meter.num_prompt_tokens,
            num_imported_tokens=meter.num_imported_tokens,
            num_generation_tokens=meter.num_generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=meter.num_steps,
            has_work=meter.has_work,
            last_step_ended_s=meter.last_step_ended_s,
            longest_recent_step_s=meter.longest_recent_step_s,
            failure=meter.failure,
        )

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use or promised, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0


class EngineMeter:
    """Counts what an engine does; written by the engine's thread only.

    Args:
        now_s: the moment of the engine's start, on its clock.
    """

    def __init__(self, now_s: float) -> None:
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_prompt_tokens = 0
        self.num_imported_tokens = 0
        self.num_generation_tokens = 0
        self.num_steps = 0
        self.has_work = False
        self.last_step_ended_s = now_s
        self.failure: str | None = None
        self._step_started_s = now_s
        self._recent_steps_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._recent_token_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._iteration_tokens: deque[int] = deque(maxlen=NUM_KEPT_ITERATIONS)

    @property
    def longest_recent_step_s(self) -> float:
        return max(self._recent_steps_s, default=0.0)

    def token_s(self) -> float:
        """Seconds that computing one token took in the best of the recent steps; infinite before there is one."""
        return min(self._recent_token_s, default=math.inf) or math.inf

    def rest_s(self, share: float) -> float:
        """How long to rest after a step, so that steps take `share` of the time and no token comes late.

        Counted is what a step takes while nobody else wants the cores, which is about the least of the latest few: so
        one that others disturbed is followed by a shorter rest.
        """
        if not self._recent_steps_s:
            return 0.0
        undisturbed_s = min(islice(reversed(self._recent_steps_s), NUM_LATEST_STEPS))
        return max(0.0, min(undisturbed_s / share, MAX_RESTED_STEP_S) - self._recent_steps_s[-1])

    def start_step(self, now_s: float) -> None:
        if not self.has_work:
            self.has_work = True
            self.last_step_ended_s = now_s
        self._step_started_s = now_s

    def end_step(self, now_s: float, *, num_tokens: int) -> None:
        self.last_step_ended_s = now_s
        self.num_steps += 1
        self._recent_steps_s.append(now_s - self._step_started_s)
        self._recent_token_s.append(self._recent_steps_s[-1] / num_tokens)
        self._iteration_tokens.append(num_tokens)

    def rest(self) -> None:
        """Nothing can be computed now."""
        self.has_work = False

    def take_iteration_tokens(self) -> tuple[int, ...]:
        """Tokens of each step since the last call, the newest 4,096. May be called from another thread."""
        taken: list[int] = []
        while True:
            try:
                taken.append(self._iteration_tokens.popleft())
            except IndexError:
                return tuple(taken)
