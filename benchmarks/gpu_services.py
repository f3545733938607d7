"""Both services and the gateway on one card, over HTTP: what a client sees, and what the hand-off adds to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bench_process import run_bench
from benchmarks.gpu_engine import LLAMA
from benchmarks.gpu_record import Row
from benchmarks.gpu_section import Begun, Message, Situation
from benchmarks.random_model import LLAMA_3_8B, prepared_random_model, small_config
from benchmarks.server_process import weir_up

SECTION = "services"
HANDOFF_GOAL = 0.05
BENCH_TIMEOUT_S = 60.0
COUNT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams at a time."""

    streams: int
    num_requests: int
    input_tokens: int
    output_tokens: int

    @property
    def bench_options(self) -> tuple[str, ...]:
        options = {
            "concurrency": self.streams,
            "num-requests": self.num_requests,
            "input-tokens": self.input_tokens,
            "output-tokens": self.output_tokens,
            "warmup": 0,
        }
        return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))

    def __str__(self) -> str:
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        return f"{streams}, {self.input_tokens:,} in, {self.output_tokens} out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What Weir and transformers are given alike.

    Attributes:
        long: one prompt at a time.
        wide: many streams.
    """

    long: Load
    wide: Load

    @classmethod
    def of(cls, situation: Situation) -> Loads:
        if situation.is_dry:
            return cls(
                long=Load(streams=1, num_requests=4, input_tokens=100, output_tokens=4),
                wide=Load(streams=2, num_requests=2, input_tokens=16, output_tokens=4),
            )
        return cls(
            long=Load(streams=1, num_requests=6, input_tokens=8192, output_tokens=64),
            wide=Load(streams=32, num_requests=96, input_tokens=512, output_tokens=128),
        )


def measure(situation: Situation) -> Iterator[Message]:
    loads = Loads.of(situation)
    yield Begun("loading")
    config = small_config(LLAMA_3_8B) if situation.is_dry else LLAMA_3_8B
    model_dir = prepared_random_model(LLAMA, config, situation.scratch, torch.device(situation.device))
    options = ["--model", str(model_dir), "--max-model-len", str(loads.long.input_tokens + 256)]
    os.environ["WEIR_DEVICE"] = situation.device  # the workers'
    os.environ["WEIR_DEVICE_CLAIM_DIR"] = str(situation.scratch / "devices")
    if situation.is_dry:
        options += ["--kv-cache-memory-bytes", str(4 << 20), "--num-threads", "1"]
    else:
        options += ["--gpu-memory-utilization", "0.45"]
    with weir_up(*options, timeout_s=90.0) as server:
        tokenizer = ("--tokenizer", str(model_dir))
        for load in (loads.long, loads.wide):
            yield Begun(str(load))
            run_bench(server.url, *load.bench_options, *tokenizer, timeout_s=BENCH_TIMEOUT_S)  # compiles, caches
            before = HandoffTimes.of(server.url)
            result = run_bench(server.url, *load.bench_options, *tokenizer, timeout_s=BENCH_TIMEOUT_S)
            if load is loads.long:
                yield ttft_row(load, result)
                yield handoff_row(load, await_handoffs(server.url, before, load.num_requests))
            else:
                yield throughput_row(load, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimes:
    """Sums over requests, by the gateway's own clock.

    Attributes:
        ttft_s: until the first token.
        exposed_s: what the hand-off added after it.
        num_handoffs: a request that the decode worker computed alone has none.
    """

    ttft_s: float
    exposed_s: float
    num_handoffs: float

    @classmethod
    def of(cls, url: str) -> HandoffTimes:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        return cls(
            ttft_s=sample_sum(text, "vllm:time_to_first_token_seconds_sum"),
            exposed_s=sample_sum(text, "weir_ttft_seconds_sum", hop="transfer"),
            num_handoffs=sample_sum(text, "weir_ttft_seconds_count", hop="transfer"),
        )

    def since(self, earlier: HandoffTimes) -> HandoffTimes:
        return HandoffTimes(
            ttft_s=self.ttft_s - earlier.ttft_s,
            exposed_s=self.exposed_s - earlier.exposed_s,
            num_handoffs=self.num_handoffs - earlier.num_handoffs,
        )


def await_handoffs(url: str, before: HandoffTimes, count: int) -> HandoffTimes:
    """Those since `before`; the last may be counted a little after its client had everything."""
    ends_s = time.monotonic() + COUNT_TIMEOUT_S
    while True:
        found = HandoffTimes.of(url).since(before)
        if found.num_handoffs >= count or time.monotonic() > ends_s:
            return found
        time.sleep(0.05)


def sample_sum(text: str, name: str, **labels: str) -> float:
    """Of all samples of that name with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def ttft_row(load: Load, result: dict[str, Any]) -> Row:
    check(result)
    ttft_s = result["ttft_s"]["p50"]
    return Row(
        section=SECTION,
        name="time to first token, p50",
        shape=str(load),
        figure=ttft_s,
        unit="s",
        remark=f"{load.input_tokens / ttft_s:,.0f} prompt tokens a second; {gaps(result)}",
    )


def handoff_row(load: Load, handoff: HandoffTimes) -> Row:
    name = "hand-off, mean time after the first token"
    if not handoff.num_handoffs:
        return Row(section=SECTION, name=name, shape=str(load), failure="no request had one")
    return Row(
        section=SECTION,
        name=name,
        shape=str(load),
        figure=handoff.exposed_s / handoff.num_handoffs,
        unit="s",
        share=handoff.exposed_s / handoff.ttft_s,
        goal=HANDOFF_GOAL,
        is_ceiling=True,
        remark=f"share of the time to the first token; {handoff.num_handoffs:.0f} of {load.num_requests} requests",
    )


def throughput_row(load: Load, result: dict[str, Any]) -> Row:
    check(result)
    return Row(
        section=SECTION,
        name="output tokens a second",
        shape=str(load),
        figure=result["output_tokens_per_s"],
        unit="tok/s",
        remark=f"TTFT p50 {result['ttft_s']['p50']:.3f} s; {gaps(result)}",
    )


def gaps(result: dict[str, Any]) -> str:
    """Between pieces of text; a few tokens may come as one piece."""
    itl = result["itl_s"]
    return "no gaps" if itl is None else f"ITL p50 {itl['p50'] * 1e3:.2f} ms, p99 {itl['p99'] * 1e3:.2f} ms"


def check(result: dict[str, Any]) -> None:
    """Raises RuntimeError when not every request was answered."""
    if result["num_failed"] or not result["complete"]:
        raise RuntimeError(f"{result['num_failed']} of {result['num_requests']} requests failed: {result['failures']}")
