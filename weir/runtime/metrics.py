"""The catalogue of every metric family: names, types, labels and buckets that dashboards already know.

Families are made against a registry that is passed in. An attribute is the family's name without `vllm:` or `weir_` and
without the `_total` of a counter. Boards sum over targets, so each fact has one owner: what a client sees is counted by
the gateway, what is computed by the worker that computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weir.core.worker import Role

LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
CHOICES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

ENGINE = "0"
"""Value of the `engine` label: one engine a process."""


def token_buckets(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 and so on, up to `max_tokens`."""
    buckets: list[float] = []
    decade = 1
    while decade <= max_tokens:
        buckets.extend(float(decade * step) for step in (1, 2, 5) if decade * step <= max_tokens)
        decade *= 10
    return tuple(buckets) or (1.0,)


F = TypeVar("F", bound=Counter | Gauge | Histogram)


class Family(Generic[F]):
    """A metric family some of whose labels have their value already; `labels` takes the others."""

    def __init__(self, family: F, constants: dict[str, str]) -> None:
        self._family = family
        self._constants = constants

    def labels(self, **labels: str) -> F:
        """The child for these labels, to be kept by a caller in a hurry."""
        child: F = self._family.labels(**self._constants, **labels)  # type: ignore[assignment]
        return child


class _Alias(Collector):
    """A second name for a family, with the same samples."""

    def __init__(self, source: Counter | Gauge | Histogram, source_name: str, alias: str) -> None:
        self._source = source
        self._source_name = source_name
        self._alias = alias

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            renamed = Metric(self._alias, metric.documentation, metric.type)
            for sample in metric.samples:
                renamed.samples.append(sample._replace(name=self._alias + sample.name.removeprefix(self._source_name)))
            yield renamed


class _Catalogue:
    """Makes families in one registry, all with the same leading labels and some of their values."""

    def __init__(self, registry: CollectorRegistry, labels: Sequence[str], constants: dict[str, str]) -> None:
        self._registry = registry
        self._labels = tuple(labels)
        self._constants = constants

    def counter(self, name: str, help: str, *labels: str) -> Family[Counter]:
        return Family(Counter(name, help, (*self._labels, *labels), registry=self._registry), self._constants)

    def gauge(self, name: str, help: str, *labels: str, alias: str | None = None) -> Family[Gauge]:
        family = Gauge(name, help, (*self._labels, *labels), registry=self._registry)
        self._register_alias(family, name, alias)
        return Family(family, self._constants)

    def histogram(
        self, name: str, help: str, buckets: Sequence[float], *labels: str, alias: str | None = None
    ) -> Family[Histogram]:
        family = Histogram(name, help, (*self._labels, *labels), buckets=buckets, registry=self._registry)
        self._register_alias(family, name, alias)
        return Family(family, self._constants)

    def _register_alias(self, family: Gauge | Histogram, name: str, alias: str | None) -> None:
        if alias is not None:
            self._registry.register(_Alias(family, name, alias))


class GatewayMetrics:
    """What a client sees, and what the gateway decides.

    Every `vllm:` family wants `.labels(model_name=...)`; Weir's own want exactly the labels of their comment. Times in
    seconds.

    Args:
        max_model_len: the largest context of the models served, in tokens; ends the buckets of token counts.
        legacy_aliases: also give `vllm:time_per_output_token_seconds`, the former name of inter-token latency.
    """

    def __init__(self, registry: CollectorRegistry, *, max_model_len: int, legacy_aliases: bool = False) -> None:
        vllm = _Catalogue(registry, ("model_name", "engine"), {"engine": ENGINE})
        tokens = token_buckets(max_model_len)

        # finished_reason: stop, length, abort, error
        self.request_success = vllm.counter("vllm:request_success", "Requests that ended.", "finished_reason")
        self.admission_rejections = vllm.counter(
            "vllm:admission_rejections", "Requests refused before any work, by reason.", "reason"
        )
        self.time_to_first_token_seconds = vllm.histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", TTFT_BUCKETS_S
        )
        self.inter_token_latency_seconds = vllm.histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a choice.",
            ITL_BUCKETS_S,
            alias="vllm:time_per_output_token_seconds" if legacy_aliases else None,
        )
        self.request_time_per_output_token_seconds = vllm.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            ITL_BUCKETS_S,
        )
        self.e2e_request_latency_seconds = vllm.histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its end.", LATENCY_BUCKETS_S
        )
        self.request_queue_time_seconds = vllm.histogram(
            "vllm:request_queue_time_seconds", "Waiting for admission and for the scheduler.", LATENCY_BUCKETS_S
        )
        self.request_inference_time_seconds = vllm.histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode together.", LATENCY_BUCKETS_S
        )
        self.request_prefill_time_seconds = vllm.histogram(
            "vllm:request_prefill_time_seconds", "Computing the prompt.", LATENCY_BUCKETS_S
        )
        self.request_decode_time_seconds = vllm.histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY_BUCKETS_S
        )
        self.request_prompt_tokens = vllm.histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", tokens)
        self.request_generation_tokens = vllm.histogram(
            "vllm:request_generation_tokens", "Output tokens a request.", tokens
        )
        self.request_max_num_generation_tokens = vllm.histogram(
            "vllm:request_max_num_generation_tokens", "Most output tokens of any choice of a request.", tokens
        )
        self.request_params_n = vllm.histogram("vllm:request_params_n", "The field n of a request.", CHOICES_BUCKETS)
        self.request_params_max_tokens = vllm.histogram(
            "vllm:request_params_max_tokens", "The field max_tokens of a request.", tokens
        )

        weir = _Catalogue(registry, (), {})
        # hop: queue, prefill, transfer, first_decode_step
        self.ttft_seconds = weir.histogram(
            "weir_ttft_seconds", "Where the time to the second token of a request went.", TTFT_BUCKETS_S, "hop"
        )
        self.redispatches = weir.counter("weir_redispatches", "Sequences sent again, by the hop that failed.", "hop")
        self.route_decisions = weir.counter("weir_route_decisions", "Choices of the router.", "policy", "choice")
        self.redis_up = _redis_up(registry)


class WorkerMetrics:
    """What one engine holds and computes. Families without further labels are ready to `set`, `inc` and `observe`.

    Args:
        max_num_batched_tokens: ends the buckets of tokens a step.
        legacy_aliases: also give `vllm:gpu_cache_usage_perc`, the former name of `vllm:kv_cache_usage_perc`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model_name: str,
        role: Role,
        max_num_batched_tokens: int,
        legacy_aliases: bool = False,
    ) -> None:
        constants = {"model_name": model_name, "engine": ENGINE}
        counts = _Catalogue(registry, ("model_name", "engine"), constants)
        gauges = _Catalogue(registry, ("model_name", "engine", "role"), {**constants, "role": role.value})

        self.num_requests_running = gauges.gauge("vllm:num_requests_running", "Sequences in the batch.").labels()
        self.num_requests_waiting = gauges.gauge("vllm:num_requests_waiting", "Sequences that wait.").labels()
        # reason: capacity, deferred
        self.num_requests_waiting_by_reason = gauges.gauge(
            "vllm:num_requests_waiting_by_reason", "Sequences that wait, by reason.", "reason"
        )
        self.kv_cache_usage_perc = gauges.gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the KV blocks in use, 0 to 1.",
            alias="vllm:gpu_cache_usage_perc" if legacy_aliases else None,
        ).labels()
        self.cache_config_info = gauges.gauge(
            "vllm:cache_config_info",
            "The KV cache as configured; always 1.",
            *("block_size", "cache_dtype", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching"),
        )
        self.prefix_cache_queries = counts.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        ).labels()
        self.prefix_cache_hits = counts.counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        ).labels()
        self.external_prefix_cache_queries = counts.counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens asked of another worker."
        ).labels()
        self.external_prefix_cache_hits = counts.counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens whose KV another worker gave."
        ).labels()
        self.num_preemptions = counts.counter("vllm:num_preemptions", "Sequences preempted.").labels()
        self.prompt_tokens = counts.counter("vllm:prompt_tokens", "Prompt tokens prefilled.").labels()
        # source: local_compute, local_cache_hit, external_kv_transfer
        self.prompt_tokens_by_source = counts.counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", "source"
        )
        self.prompt_tokens_cached = counts.counter(
            "vllm:prompt_tokens_cached", "Prompt tokens whose KV was not computed here."
        ).labels()
        self.generation_tokens = counts.counter("vllm:generation_tokens", "Output tokens made.").labels()
        self.iteration_tokens_total = counts.histogram(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", token_buckets(max_num_batched_tokens)
        ).labels()

        self.handoff_seconds = counts.histogram(
            "weir_handoff_seconds", "From the fetch of a hand-off to its commit.", TTFT_BUCKETS_S
        ).labels()
        self.handoff_bytes = counts.counter("weir_handoff_bytes", "KV bytes received.", "transport")
        self.handoff_failures = counts.counter("weir_handoff_failures", "Hand-offs that failed.", "reason")
        self.handoffs_in_flight = gauges.gauge("weir_handoffs_in_flight", "Hand-offs that have not ended.").labels()
        # tier: host, disk
        self.kv_tier_usage_perc = gauges.gauge(
            "weir_kv_tier_usage_perc", "Share of a tier under the KV pool that holds blocks, 0 to 1.", "tier"
        )
        self.kv_tier_saved_blocks = counts.counter(
            "weir_kv_tier_saved_blocks", "KV blocks that went into a tier under the pool.", "tier"
        )
        self.kv_tier_hit_tokens = counts.counter(
            "weir_kv_tier_hit_tokens", "Tokens whose KV came back from a tier under the pool.", "tier"
        )
        self.held_blocks = gauges.gauge("weir_held_blocks", "Blocks kept for hand-offs.").labels()
        self.leases_expired = counts.counter("weir_leases_expired", "Holds that ended by their lease.").labels()
        self.prefill_queued_tokens = gauges.gauge(
            "weir_prefill_queued_tokens", "Uncached prompt tokens not computed yet."
        ).labels()
        self.decode_free_blocks = gauges.gauge("weir_decode_free_blocks", "Blocks that a claim could take.").labels()
        self.stale_frames = counts.counter(
            "weir_stale_frames", "Frames dropped for a stale epoch or an ended hand-off."
        ).labels()
        self.redis_up = _redis_up(registry)


def _redis_up(registry: CollectorRegistry) -> Gauge:
    return Gauge("weir_redis_up", "1 while this process' link to Redis works.", registry=registry)
