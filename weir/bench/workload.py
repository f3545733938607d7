"""What is asked of a server, and at which pace: the workloads of docs/benchmarking.md by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from weir.bench.lengths import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Long prompts that land together once every running stream has had `after_chunks` pieces of text."""

    num_requests: int
    input_tokens: int
    output_tokens: int
    after_chunks: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and their pace: `concurrency` at a time, or in a Poisson process at each of `request_rates`.

    Attributes:
        input_tokens: of a request's own part, which follows the shared prefix.
        request_rates: arrivals a second, a run for each; infinity is all at once.
        burst: lands in a second run of the same streams.
    """

    name: str
    input_tokens: Lengths
    output_tokens: Lengths
    num_requests: int
    shared_prefix_tokens: int = 0
    concurrency: int | None = None
    request_rates: tuple[float, ...] = ()
    burst: Burst | None = None

    def draw_lengths(self, seed: int) -> list[tuple[int, int]]:
        """Own input tokens and output tokens of every request; the same for the same seed."""
        rng = random.Random(f"lengths {seed}")
        return [(self.input_tokens.draw(rng), self.output_tokens.draw(rng)) for _ in range(self.num_requests)]


def _closed(name: str, streams: int, num_requests: int, tokens_in: int, tokens_out: int, shared: int = 0) -> Workload:
    return Workload(
        name=name,
        input_tokens=Lengths.fixed(tokens_in),
        output_tokens=Lengths.fixed(tokens_out),
        shared_prefix_tokens=shared,
        num_requests=num_requests,
        concurrency=streams,
    )


PRESETS = {
    "w1": _closed("w1", 1, 8, 128, 64),
    "w2": _closed("w2", 16, 48, 256, 64),
    "w3": _closed("w3", 32, 64, 64, 128),
    "w4": _closed("w4", 8, 32, 32, 32, shared=512),
    "w5": Workload(
        name="w5",
        input_tokens=Lengths.fixed(64),
        output_tokens=Lengths.fixed(256),
        num_requests=4,
        concurrency=4,
        burst=Burst(num_requests=4, input_tokens=1500, output_tokens=16),
    ),
    "w6": Workload(
        name="w6",
        input_tokens=Lengths(low=1, high=1024, median=128, sigma=1.0),
        output_tokens=Lengths(low=1, high=256, median=64, sigma=0.8),
        num_requests=32,
        request_rates=(0.5, 1.0, 2.0, 4.0, 8.0),
    ),
}


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> Sequence[float]:
    """Seconds from the first arrival, which is at 0, with exponential gaps of mean 1 / `rate`.

    The same seed gives the same pattern at every rate, only faster.
    """
    rng = random.Random(f"arrivals {seed}")
    arrivals = [0.0]
    for _ in range(num_requests - 1):
        arrivals.append(arrivals[-1] + rng.expovariate(1.0) / rate)
    return arrivals
