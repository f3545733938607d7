from __future__ import annotations

from prometheus_client import CollectorRegistry

from kv_transfer.stats import TransferStats
from weir.core.worker import Role
from weir.engine.stats import EngineStats, TierStats
from weir.runtime.metrics import WorkerMetrics
from weir.worker.engine_metrics import WorkerMetricsMirror


def refreshed(role: Role, *rounds: tuple[EngineStats, TransferStats, tuple[int, ...]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, model_name="tiny", role=role, max_num_batched_tokens=256)
    mirror = WorkerMetricsMirror(metrics, role)
    for engine, transfer, iteration_tokens in rounds:
        mirror.refresh(engine, transfer, iteration_tokens=iteration_tokens, num_handoffs_in_flight=3, is_redis_up=True)
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum of the samples of that name with these labels."""
    samples = (sample for family in registry.collect() for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


ENGINE = EngineStats(
    num_running=2,
    num_waiting=5,
    num_deferred=1,
    num_loading=1,
    host=TierStats(num_blocks=50, num_used_blocks=10, num_saved_blocks=30, num_hit_tokens=160),
    disk=TierStats(num_blocks=80, num_used_blocks=20, num_saved_blocks=25, num_hit_tokens=32),
    queued_tokens=90,
    free_blocks=25,
    total_blocks=100,
    held_blocks=7,
    prefix_cache_queries=200,
    prefix_cache_hits=80,
    num_prompt_tokens=200,
    num_imported_tokens=64,
    num_generation_tokens=11,
    num_preemptions=1,
)
TRANSFER = TransferStats(leases_expired_total=2, stale_frames_total=3)
TRANSFER.bytes_by_transport["tcp"] = 1000
TRANSFER.failures_by_reason["handoff_lost"] = 4


def test_gauges_show_the_newest_figures() -> None:
    registry = refreshed(Role.DECODE, (EngineStats(num_running=9), TransferStats(), ()), (ENGINE, TRANSFER, ()))
    assert value(registry, "vllm:num_requests_running") == 2
    assert value(registry, "vllm:num_requests_waiting") == 6
    assert value(registry, "vllm:num_requests_waiting_by_reason", reason="capacity") == 4
    assert value(registry, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert value(registry, "vllm:kv_cache_usage_perc", role="decode") == 0.75
    assert value(registry, "weir_kv_tier_usage_perc", tier="host") == 0.2
    assert value(registry, "weir_kv_tier_usage_perc", tier="disk") == 0.25
    assert value(registry, "weir_held_blocks") == 7
    assert value(registry, "weir_prefill_queued_tokens") == 90
    assert value(registry, "weir_decode_free_blocks") == 25
    assert value(registry, "weir_handoffs_in_flight") == 3
    assert value(registry, "weir_redis_up") == 1


def test_counters_grow_by_what_the_engine_has_counted_and_no_more() -> None:
    registry = refreshed(Role.DECODE, (ENGINE, TRANSFER, ()), (ENGINE, TRANSFER, ()))
    assert value(registry, "vllm:prompt_tokens_total") == 200
    assert value(registry, "vllm:prefix_cache_queries_total") == 200
    assert value(registry, "vllm:prefix_cache_hits_total") == 80
    assert value(registry, "vllm:prompt_tokens_by_source_total", source="local_compute") == 120
    assert value(registry, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 80
    assert value(registry, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 64
    assert value(registry, "vllm:generation_tokens_total") == 11
    assert value(registry, "vllm:num_preemptions_total") == 1
    assert value(registry, "weir_kv_tier_saved_blocks_total", tier="host") == 30
    assert value(registry, "weir_kv_tier_saved_blocks_total", tier="disk") == 25
    assert value(registry, "weir_kv_tier_hit_tokens_total", tier="host") == 160
    assert value(registry, "weir_kv_tier_hit_tokens_total", tier="disk") == 32
    assert value(registry, "weir_leases_expired_total") == 2
    assert value(registry, "weir_stale_frames_total") == 3


def test_bytes_and_failures_of_a_hand_off_are_counted_by_decode_alone() -> None:
    decode = refreshed(Role.DECODE, (ENGINE, TRANSFER, ()))
    assert value(decode, "weir_handoff_bytes_total", transport="tcp") == 1000
    assert value(decode, "weir_handoff_failures_total", reason="handoff_lost") == 4
    prefill = refreshed(Role.PREFILL, (ENGINE, TRANSFER, ()))
    assert value(prefill, "weir_handoff_bytes_total") == value(prefill, "weir_handoff_failures_total") == 0


def test_every_step_is_one_observation() -> None:
    registry = refreshed(Role.DECODE, (ENGINE, TRANSFER, (64, 64, 3)), (ENGINE, TRANSFER, (1,)))
    assert value(registry, "vllm:iteration_tokens_total_count") == 4
    assert value(registry, "vllm:iteration_tokens_total_sum") == 132
