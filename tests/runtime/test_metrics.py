"""The table of names, types, labels and buckets that existing dashboards query, written out once more by hand."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from weir.core.worker import Role
from weir.runtime.metrics import Family, GatewayMetrics, WorkerMetrics, token_buckets

TIMES = [
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
]
TTFT = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
    *(640, 2560),
]
ITL = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
STEP_TOKENS = [1, 2, 5, 10, 20, 50, 100, 200]

VLLM = {"model_name", "engine"}
GATEWAY = {
    "vllm:request_success_total": ("counter", {*VLLM, "finished_reason"}, None),
    "vllm:admission_rejections_total": ("counter", {*VLLM, "reason"}, None),
    "vllm:time_to_first_token_seconds": ("histogram", VLLM, TTFT),
    "vllm:inter_token_latency_seconds": ("histogram", VLLM, ITL),
    "vllm:request_time_per_output_token_seconds": ("histogram", VLLM, ITL),
    "vllm:e2e_request_latency_seconds": ("histogram", VLLM, TIMES),
    "vllm:request_queue_time_seconds": ("histogram", VLLM, TIMES),
    "vllm:request_inference_time_seconds": ("histogram", VLLM, TIMES),
    "vllm:request_prefill_time_seconds": ("histogram", VLLM, TIMES),
    "vllm:request_decode_time_seconds": ("histogram", VLLM, TIMES),
    "vllm:request_prompt_tokens": ("histogram", VLLM, TOKENS),
    "vllm:request_generation_tokens": ("histogram", VLLM, TOKENS),
    "vllm:request_max_num_generation_tokens": ("histogram", VLLM, TOKENS),
    "vllm:request_params_n": ("histogram", VLLM, [1, 2, 5, 10, 20]),
    "vllm:request_params_max_tokens": ("histogram", VLLM, TOKENS),
    "weir_ttft_seconds": ("histogram", {"hop"}, TTFT),
    "weir_redispatches_total": ("counter", {"hop"}, None),
    "weir_route_decisions_total": ("counter", {"policy", "choice"}, None),
    "weir_redis_up": ("gauge", set(), None),
}
ROLE = {*VLLM, "role"}
CACHE = {"block_size", "cache_dtype", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching"}
WORKER = {
    "vllm:num_requests_running": ("gauge", ROLE, None),
    "vllm:num_requests_waiting": ("gauge", ROLE, None),
    "vllm:num_requests_waiting_by_reason": ("gauge", {*ROLE, "reason"}, None),
    "vllm:kv_cache_usage_perc": ("gauge", ROLE, None),
    "vllm:cache_config_info": ("gauge", ROLE | CACHE, None),
    "vllm:prefix_cache_queries_total": ("counter", VLLM, None),
    "vllm:prefix_cache_hits_total": ("counter", VLLM, None),
    "vllm:external_prefix_cache_queries_total": ("counter", VLLM, None),
    "vllm:external_prefix_cache_hits_total": ("counter", VLLM, None),
    "vllm:num_preemptions_total": ("counter", VLLM, None),
    "vllm:prompt_tokens_total": ("counter", VLLM, None),
    "vllm:prompt_tokens_by_source_total": ("counter", {*VLLM, "source"}, None),
    "vllm:prompt_tokens_cached_total": ("counter", VLLM, None),
    "vllm:generation_tokens_total": ("counter", VLLM, None),
    "vllm:iteration_tokens_total": ("histogram", VLLM, STEP_TOKENS),
    "weir_handoff_seconds": ("histogram", VLLM, TTFT),
    "weir_handoff_bytes_total": ("counter", {*VLLM, "transport"}, None),
    "weir_handoff_failures_total": ("counter", {*VLLM, "reason"}, None),
    "weir_handoffs_in_flight": ("gauge", ROLE, None),
    "weir_kv_tier_usage_perc": ("gauge", {*ROLE, "tier"}, None),
    "weir_kv_tier_saved_blocks_total": ("counter", {*VLLM, "tier"}, None),
    "weir_kv_tier_hit_tokens_total": ("counter", {*VLLM, "tier"}, None),
    "weir_held_blocks": ("gauge", ROLE, None),
    "weir_leases_expired_total": ("counter", VLLM, None),
    "weir_prefill_queued_tokens": ("gauge", ROLE, None),
    "weir_decode_free_blocks": ("gauge", ROLE, None),
    "weir_stale_frames_total": ("counter", VLLM, None),
    "weir_redis_up": ("gauge", set(), None),
}


def _touch_all(metrics: object, labels: dict[str, str]) -> None:
    """Make one child of every family, so that it is scraped."""
    for family in vars(metrics).values():
        if isinstance(family, Family):
            names = set(family._family._labelnames) - set(family._constants)
            family.labels(**{name: labels.get(name, "x") for name in names})


def _scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    """Families by name as scraped, `_created` left out."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in families
        if not family.name.endswith("_created")
    }


def _shape(family: Metric) -> tuple[str, set[str], list[float] | None]:
    labels = {name for sample in family.samples for name in sample.labels} - {"le"}
    bounds = sorted({float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels})
    return family.type, labels, [bound for bound in bounds if not math.isinf(bound)] or None


def _gateway(registry: CollectorRegistry, *, legacy_aliases: bool = False) -> GatewayMetrics:
    return GatewayMetrics(registry, max_model_len=8192, legacy_aliases=legacy_aliases)


def _worker(registry: CollectorRegistry, *, legacy_aliases: bool = False) -> WorkerMetrics:
    return WorkerMetrics(
        registry, model_name="m", role=Role.DECODE, max_num_batched_tokens=256, legacy_aliases=legacy_aliases
    )


@pytest.mark.parametrize(("make", "table"), [(_gateway, GATEWAY), (_worker, WORKER)])
def test_families_have_the_names_types_labels_and_buckets_of_the_table(
    make: type, table: dict[str, tuple[str, set[str], list[float] | None]]
) -> None:
    registry = CollectorRegistry()
    _touch_all(make(registry), {"model_name": "m"})
    assert {name: _shape(family) for name, family in _scrape(registry).items()} == table


def test_no_family_is_counted_by_both_sides() -> None:
    assert set(GATEWAY) & set(WORKER) == {"weir_redis_up"}


def test_former_names_are_given_only_when_asked_for() -> None:
    registry = CollectorRegistry()
    gateway = _gateway(registry, legacy_aliases=True)
    gateway.inter_token_latency_seconds.labels(model_name="m").observe(0.03)
    families = _scrape(registry)
    former, current = families["vllm:time_per_output_token_seconds"], families["vllm:inter_token_latency_seconds"]
    assert _shape(former) == _shape(current)
    assert [sample.value for sample in former.samples] == [
        sample.value for sample in current.samples if not sample.name.endswith("_created")
    ]
    registry = CollectorRegistry()
    worker = _worker(registry, legacy_aliases=True)
    worker.kv_cache_usage_perc.set(0.5)
    assert _scrape(registry)["vllm:gpu_cache_usage_perc"].samples[0].value == 0.5


def test_a_worker_shows_zero_before_any_work() -> None:
    registry = CollectorRegistry()
    _worker(registry)
    assert _scrape(registry)["vllm:generation_tokens_total"].samples[0].value == 0
    assert _scrape(registry)["vllm:num_requests_running"].samples[0].labels == {
        "model_name": "m",
        "engine": "0",
        "role": "decode",
    }


def test_token_buckets_end_at_the_context() -> None:
    assert token_buckets(1) == (1.0,)
    assert token_buckets(50)[-2:] == (20.0, 50.0)
    assert token_buckets(49)[-1] == 20.0
