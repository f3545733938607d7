"""Copies what the engine and the transfer count into the worker's metric families."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from kv_transfer.stats import TransferStats
from weir.core.worker import Role
from weir.engine.stats import EngineStats
from weir.runtime.metrics import WorkerMetrics


class WorkerMetricsMirror:
    """Brings `metrics` up to the newest figures at each `refresh`; counters by what they have grown.

    Of a hand-off only the decode side counts bytes and failures: boards sum over all workers.
    """

    def __init__(self, metrics: WorkerMetrics, role: Role) -> None:
        self._metrics = metrics
        self._is_decode = role is Role.DECODE
        self._seen: dict[Counter, int] = {}

    def refresh(
        self,
        engine: EngineStats,
        transfer: TransferStats,
        *,
        iteration_tokens: Iterable[int],
        num_handoffs_in_flight: int,
        is_redis_up: bool,
        num_waiting: int = 0,
        queued_tokens: int = 0,
    ) -> None:
        """One look at everything; costs some microseconds.

        Args:
            iteration_tokens: how many tokens each step computed since the last refresh.
            num_waiting, queued_tokens: of requests that wait before the engine.
        """
        metrics = self._metrics
        for num_tokens in iteration_tokens:
            metrics.iteration_tokens_total.observe(num_tokens)
        metrics.num_requests_running.set(engine.num_running)
        num_waiting += engine.num_waiting + engine.num_loading
        metrics.num_requests_waiting.set(num_waiting)
        deferred = engine.num_deferred + engine.num_loading
        capacity = num_waiting - deferred
        metrics.num_requests_waiting_by_reason.labels(reason="deferred").set(deferred)
        metrics.num_requests_waiting_by_reason.labels(reason="capacity").set(capacity)
        metrics.kv_cache_usage_perc.set(engine.kv_usage)
        metrics.held_blocks.set(engine.held_blocks)
        metrics.prefill_queued_tokens.set(engine.queued_tokens + queued_tokens)
        metrics.decode_free_blocks.set(engine.free_blocks)
        metrics.handoffs_in_flight.set(num_handoffs_in_flight)
        metrics.redis_up.set(is_redis_up)

        self._advance(metrics.prefix_cache_queries, engine.prefix_cache_queries)
        self._advance(metrics.prefix_cache_hits, engine.prefix_cache_hits)
        self._advance(metrics.num_preemptions, engine.num_preemptions)
        self._advance(metrics.prompt_tokens, engine.num_prompt_tokens)
        self._advance(metrics.prompt_tokens_cached, engine.prefix_cache_hits)
        by_source = metrics.prompt_tokens_by_source
        self._advance(by_source.labels(source="local_cache_hit"), engine.prefix_cache_hits)
        self._advance(by_source.labels(source="local_compute"), engine.num_prompt_tokens - engine.prefix_cache_hits)
        self._advance(by_source.labels(source="external_kv_transfer"), engine.num_imported_tokens)
        self._advance(metrics.external_prefix_cache_queries, engine.num_imported_tokens)
        self._advance(metrics.external_prefix_cache_hits, engine.num_imported_tokens)
        self._advance(metrics.generation_tokens, engine.num_generation_tokens)
        for name, tier in (("host", engine.host), ("disk", engine.disk)):
            metrics.kv_tier_usage_perc.labels(tier=name).set(tier.usage)
            self._advance(metrics.kv_tier_saved_blocks.labels(tier=name), tier.num_saved_blocks)
            self._advance(metrics.kv_tier_hit_tokens.labels(tier=name), tier.num_hit_tokens)
        self._advance(metrics.leases_expired, transfer.leases_expired_total)
        self._advance(metrics.stale_frames, transfer.stale_frames_total)
        if not self._is_decode:
            return
        for transport, size_bytes in transfer.bytes_by_transport.items():
            self._advance(metrics.handoff_bytes.labels(transport=transport), size_bytes)
        for reason, count in transfer.failures_by_reason.items():
            self._advance(metrics.handoff_failures.labels(reason=reason), count)

    def _advance(self, counter: Counter, total: int) -> None:
        counter.inc(total - self._seen.get(counter, 0))
        self._seen[counter] = total
