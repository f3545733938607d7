"""What clients of this gateway see, under the names that dashboards know (`weir.runtime.metrics.GatewayMetrics`).

One timeline for each prompt turns the moments the pipeline reports into samples. It knows no worker and no wire.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.registry import CollectorRegistry

from gateway.prompt_request import PromptRequest
from gateway.router import RouteChoice
from gateway.worker_protocols import PrefillResult
from weir.cluster.request_journal import HopTimings
from weir.core.deadline import Clock
from weir.core.request import HandoffTimings
from weir.runtime.metrics import GatewayMetrics

ROUTE_POLICY = "prefix_and_load"
"""The `policy` label of the one policy there is (`gateway.router`)."""

UNKNOWN_MODEL = ""
"""The `model_name` label of what was refused before its model was known."""


@dataclass(frozen=True, slots=True)
class _ModelHistograms:
    """The children of one model, looked up once."""

    ttft: Histogram
    itl: Histogram
    tpot: Histogram
    e2e: Histogram
    queue: Histogram
    inference: Histogram
    prefill: Histogram
    decode: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    max_generation_tokens: Histogram
    params_n: Histogram
    params_max_tokens: Histogram


class RequestMetrics:
    """The gateway's families in one registry.

    Args:
        max_model_len: the largest context of the models served, in tokens.
        legacy_aliases: see `GatewayMetrics`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        max_model_len: int,
        legacy_aliases: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self.registry = registry
        self._families = GatewayMetrics(registry, max_model_len=max_model_len, legacy_aliases=legacy_aliases)
        self._clock = clock
        self._by_model: dict[str, _ModelHistograms] = {}

    def start(self, prompt: PromptRequest) -> RequestTimeline:
        """The timeline of a prompt that was admitted now."""
        return RequestTimeline(self, prompt, self._clock)

    def count_route(self, choice: RouteChoice) -> None:
        self._families.route_decisions.labels(policy=ROUTE_POLICY, choice=choice.value).inc()

    def count_redispatch(self, hop: str) -> None:
        self._families.redispatches.labels(hop=hop).inc()

    def count_rejection(self, reason: str, *, model: str = UNKNOWN_MODEL) -> None:
        """A request that admission refused: queue_full, wait_too_long, draining or redis_away."""
        self._families.admission_rejections.labels(model_name=model, reason=reason).inc()

    def watch_redis(self, is_up: Callable[[], bool]) -> None:
        """Ask at every scrape whether the link to Redis works."""
        self._families.redis_up.set_function(lambda: float(is_up()))

    def histograms(self, model: str) -> _ModelHistograms:
        found = self._by_model.get(model)
        if found is None:
            families = self._families
            found = self._by_model[model] = _ModelHistograms(
                ttft=families.time_to_first_token_seconds.labels(model_name=model),
                itl=families.inter_token_latency_seconds.labels(model_name=model),
                tpot=families.request_time_per_output_token_seconds.labels(model_name=model),
                e2e=families.e2e_request_latency_seconds.labels(model_name=model),
                queue=families.request_queue_time_seconds.labels(model_name=model),
                inference=families.request_inference_time_seconds.labels(model_name=model),
                prefill=families.request_prefill_time_seconds.labels(model_name=model),
                decode=families.request_decode_time_seconds.labels(model_name=model),
                prompt_tokens=families.request_prompt_tokens.labels(model_name=model),
                generation_tokens=families.request_generation_tokens.labels(model_name=model),
                max_generation_tokens=families.request_max_num_generation_tokens.labels(model_name=model),
                params_n=families.request_params_n.labels(model_name=model),
                params_max_tokens=families.request_params_max_tokens.labels(model_name=model),
            )
        return found

    def success_counter(self, model: str, finished_reason: str) -> Counter:
        return self._families.request_success.labels(model_name=model, finished_reason=finished_reason)

    def ttft_hop(self, hop: str) -> Histogram:
        return self._families.ttft_seconds.labels(hop=hop)


class RequestTimeline:
    """One prompt from its arrival to its end, in seconds on the monotonic clock."""

    def __init__(self, metrics: RequestMetrics, prompt: PromptRequest, clock: Clock) -> None:
        self._metrics = metrics
        self._prompt = prompt
        self._clock = clock
        self._histograms = metrics.histograms(prompt.card.name)
        self._queue_s = max(0.0, clock() - prompt.arrived_s)
        self._first_token_s: float | None = None
        self._last_token_s = [0.0] * prompt.n
        self._first_token_of_choice_s = [0.0] * prompt.n
        self._num_tokens = [0] * prompt.n
        self._prefill_s: float | None = None
        self._transfer_s: float | None = None
        self._total_s: float | None = None

    @property
    def num_generated_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(self._num_tokens)

    @property
    def timings(self) -> HopTimings:
        """What is known of each hop so far."""
        first_s = self._first_token_s
        return HopTimings(
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            transfer_s=self._transfer_s,
            first_token_s=None if first_s is None else first_s - self._prompt.arrived_s,
            decode_s=None if first_s is None else max(self._last_token_s) - first_s,
            total_s=self._total_s,
        )

    def on_prefilled(self, result: PrefillResult) -> None:
        """The prompt was computed on a prefill worker; only the first time counts."""
        if self._prefill_s is None:
            self._queue_s += result.queue_s
            self._prefill_s = result.prefill_s
            self._metrics.ttft_hop("queue").observe(self._queue_s)
            self._metrics.ttft_hop("prefill").observe(result.prefill_s)

    def on_handoff(self, timings: HandoffTimings) -> None:
        """A hand-off has ended well."""
        self._transfer_s = timings.transfer_s
        self._metrics.ttft_hop("transfer").observe(timings.exposed_s)
        self._metrics.ttft_hop("first_decode_step").observe(timings.first_step_s)

    def on_tokens(self, choice_index: int, num_tokens: int) -> None:
        """New tokens of a choice have arrived."""
        if not num_tokens:
            return
        now_s = self._clock()
        if self._num_tokens[choice_index]:
            self._histograms.itl.observe(now_s - self._last_token_s[choice_index])
        else:
            self._first_token_of_choice_s[choice_index] = now_s
            if self._first_token_s is None:
                self._first_token_s = now_s
                self._histograms.ttft.observe(now_s - self._prompt.arrived_s)
        self._last_token_s[choice_index] = now_s
        self._num_tokens[choice_index] += num_tokens

    def finish(self, finished_reason: str) -> None:
        """The prompt has ended: stop, length, abort or error."""
        self._metrics.success_counter(self._prompt.card.name, finished_reason).inc()
        e2e_s = self._clock() - self._prompt.arrived_s
        self._total_s = e2e_s
        histograms = self._histograms
        histograms.e2e.observe(e2e_s)
        histograms.queue.observe(self._queue_s)
        histograms.inference.observe(max(0.0, e2e_s - self._queue_s))
        histograms.prompt_tokens.observe(len(self._prompt.prompt_token_ids))
        histograms.generation_tokens.observe(self.num_generated_tokens)
        histograms.max_generation_tokens.observe(max(self._num_tokens))
        histograms.params_n.observe(self._prompt.n)
        histograms.params_max_tokens.observe(self._prompt.sampling.max_tokens)
        if self._first_token_s is not None:
            first_s = self._first_token_s
            histograms.prefill.observe(max(0.0, first_s - self._prompt.arrived_s - self._queue_s))
            histograms.decode.observe(max(self._last_token_s) - first_s)
        for first_s, last_s, num_tokens in zip(
            self._first_token_of_choice_s, self._last_token_s, self._num_tokens, strict=True
        ):
            if num_tokens > 1:
                histograms.tpot.observe((last_s - first_s) / (num_tokens - 1))
