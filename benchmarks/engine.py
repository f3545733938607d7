"""What one engine computes without any service: decode steps and prefill, beside what the machine can do at most.

    python -m benchmarks.engine [--repeats 3] [--threads N] [--model-dir DIR] [--ways float32 auto torch]

Every way of storing weights takes its turn in each repetition, so that what the machine does beside it hits all alike.
A decode step has 1, 8 or 32 sequences of 256 tokens of context; a prefill is one prompt of 512 or 1,500 tokens in one
step. What `peaks.cpp` reaches with as many threads, in bytes read and in multiply-adds, is measured in each repetition;
the second table says which share of it a step needs at least.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison import Spread
from tests.fakes.real_model import prepare_real_model
from weir.engine.batch import ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.models.decoder_config import DecoderConfig

CONTEXT = 256
WAYS: dict[str, dict[str, object]] = {
    "torch": {"kernel_cache_dir": None},
    "float32": {},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "auto": {"quantization": "auto"},
}
WORK = {"decode 1": 1, "decode 8": 8, "decode 32": 32, "prefill 512": 512, "prefill 1500": 1500}


def make_items(work: str, block_size: int) -> list[ScheduledSequence]:
    count = WORK[work]
    if work.startswith("prefill"):
        blocks = range(-(-count // block_size))
        ids = tuple(3 + index % 1000 for index in range(count))
        only = ScheduledSequence(sequence_id="p", token_ids=ids, start=0, block_ids=blocks, num_logits=1)
        return [only]
    each = CONTEXT // block_size
    items = [
        ScheduledSequence(
            sequence_id=str(index),
            token_ids=(5 + index,),
            start=CONTEXT - 1,
            block_ids=range(index * each, (index + 1) * each),
            num_logits=1,
        )
        for index in range(count)
    ]
    return items


def measure(runner: ModelRunner, work: str) -> float:
    """Tokens a second: the median of a second's steps, at least three."""
    items = make_items(work, runner.layout.block_size)
    runner.execute(items)
    times: list[float] = []
    started_s = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - started_s < 1:
        step_s = time.perf_counter()
        runner.execute(items)
        times.append(time.perf_counter() - step_s)
    return WORK[work] / statistics.median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one step has to do at least."""

    num_bytes: int
    multiply_adds: int

    @classmethod
    def of(cls, runner: ModelRunner, config: DecoderConfig, work: str) -> Cost:
        assert runner.plan is not None
        count = WORK[work]
        is_prefill = work.startswith("prefill")
        num_logits, context = (1, count // 2) if is_prefill else (count, CONTEXT)
        num_kv_tokens = count if is_prefill else count * CONTEXT
        in_matrices = sum(
            matrix.num_outputs * matrix.num_inputs * (num_logits if is_for_logits else count)
            for matrix, is_for_logits in runner.plan.matrices
        )
        in_attention = 2 * count * context * config.num_layers * config.num_heads * config.head_dim
        weight_bytes = sum(matrix.num_bytes for matrix, _ in runner.plan.matrices)
        return cls(
            num_bytes=weight_bytes + num_kv_tokens * runner.layout.token_bytes,
            multiply_adds=in_matrices + in_attention,
        )


class Peaks:
    """`peaks.cpp`, compiled for this machine."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "peaks.so"
            source = Path(__file__).with_name("peaks.cpp")
            flags = ["-O3", "-march=native", "-std=c++20", "-pthread", "-shared", "-fPIC"]
            subprocess.run(["c++", *flags, str(source), "-o", str(path)], check=True)
            self._library = ctypes.CDLL(str(path))
        for name in ("bytes_per_second", "multiply_adds_per_second"):
            getattr(self._library, name).restype = ctypes.c_double

    def bytes_per_second(self) -> float:
        return float(self._library.bytes_per_second(self._num_threads))

    def multiply_adds_per_second(self) -> float:
        return float(self._library.multiply_adds_per_second(self._num_threads))


def show(values: list[float]) -> str:
    return Spread.over(values).show(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model-dir", type=Path, help="a prepared model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    model_dir = arguments.model_dir or prepare_real_model()
    runners = {
        name: ModelRunner(
            EngineConfig(
                model_dir=model_dir,
                num_blocks=1024,
                max_model_len=2048,
                max_num_batched_tokens=2048,
                num_threads=arguments.threads,
                **WAYS[name],  # type: ignore[arg-type]
            )
        )
        for name in arguments.ways
    }
    for runner in runners.values():
        runner.cache.tensor.normal_()
    peaks = Peaks(arguments.threads)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    reads: list[float] = []
    products: list[float] = []
    for _ in range(arguments.repeats):
        reads.append(peaks.bytes_per_second())
        products.append(peaks.multiply_adds_per_second())
        for work in WORK:
            for name, runner in runners.items():
                rates[name, work].append(measure(runner, work))
    print(f"{arguments.threads} threads: reads {show([each / 1e9 for each in reads])} GB/s, ", end="")
    print(f"float32 multiply-adds {show([2 * each / 1e9 for each in products])} GFLOP/s\n")
    print("| tokens a second | " + " | ".join(WORK) + " |")
    print("| --- |" + " --- |" * len(WORK))
    for name in runners:
        print(f"| {name} | " + " | ".join(show(rates[name, work]) for work in WORK) + " |")
    print("\n| share of what threads read / of their float32 multiply-adds | " + " | ".join(WORK) + " |")
    print("| --- |" + " --- |" * len(WORK))
    config = DecoderConfig.load(model_dir)
    for name, runner in runners.items():
        if runner.plan is not None:
            shares = [
                f"{cost.num_bytes * steps_per_s / statistics.median(reads):.0%} / "
                f"{cost.multiply_adds * steps_per_s / statistics.median(products):.0%}"
                for work in WORK
                for cost, steps_per_s in [
                    (Cost.of(runner, config, work), statistics.median(rates[name, work]) / WORK[work])
                ]
            ]
            print(f"| {name} | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    main()
