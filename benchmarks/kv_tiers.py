"""Conversations whose KV exceeds the pool: how long a returning turn takes to its first token, with tiers and without.

    python -m benchmarks.kv_tiers [--repeats 3] [--model-dir DIR]

Six conversations take turns, so that each finds its KV evicted when it comes back. Every way takes each turn right
after the others, on the same tokens, and must choose the same tokens. The pool of `none`, `host` and `disk` has room
for less than two conversations; host memory has room for all of them, or with the disk behind it for a half.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.comparison import Spread
from benchmarks.machine import describe_machine
from tests.fakes.real_model import prepare_real_model
from weir.core.request import SamplingParams
from weir.engine.llm import LLM
from weir.engine.model_runner import ModelRunner

NUM_CONVERSATIONS = 6
NUM_TURNS = 4
FIRST_TOKENS = 320
TURN_TOKENS = 64
MAX_MODEL_LEN = 640
POOL_BLOCKS = 56
NUM_BLOCKS = NUM_CONVERSATIONS * (FIRST_TOKENS + NUM_TURNS * TURN_TOKENS) // 16
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def load_ways(model_dir: Path, directory: Path) -> dict[str, LLM]:
    """Engines that differ in where KV may lie."""
    block_bytes = 0

    def load(**settings: Any) -> LLM:
        return LLM(model_dir, quantization="auto", max_model_len=MAX_MODEL_LEN, device="cpu", **settings)

    def note_layout(config: Any) -> ModelRunner:
        nonlocal block_bytes
        runner = ModelRunner(config)
        block_bytes = runner.layout.block_bytes
        return runner

    none = load(num_blocks=POOL_BLOCKS, load_runner=note_layout)
    return {
        "none": none,
        "host": load(num_blocks=POOL_BLOCKS, host_kv_cache_bytes=NUM_BLOCKS * block_bytes),
        "disk": load(
            num_blocks=POOL_BLOCKS,
            host_kv_cache_bytes=NUM_BLOCKS // 2 * block_bytes,
            disk_kv_cache_bytes=2 * NUM_BLOCKS * block_bytes,
            disk_kv_cache_dir=directory,
        ),
        "large pool": load(num_blocks=2 * NUM_BLOCKS),
    }


def measure(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to the first token, the token, and how many prompt tokens were cached."""
    started_s = time.perf_counter()
    (generation,) = llm.generate([prompt], FIRST_TOKEN)
    return time.perf_counter() - started_s, generation.token_ids[0], generation.num_cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-dir", type=Path, help="a prepared model (default: SmolLM2-135M-Instruct)")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    num_cached: dict[str, int] = defaultdict(int)
    num_prompt_tokens = 0
    with tempfile.TemporaryDirectory() as scratch:
        ways = load_ways(arguments.model_dir or prepare_real_model(), Path(scratch))
        for repeat in range(arguments.repeats):
            source = random.Random(repeat)
            conversations = [source.choices(range(100, 20000), k=FIRST_TOKENS) for _ in range(NUM_CONVERSATIONS)]
            sums: dict[str, float] = defaultdict(float)
            for turn in range(NUM_TURNS):
                for prompt in conversations:
                    first_tokens = set()
                    for name, llm in ways.items():
                        seconds, token_id, cached = measure(llm, prompt)
                        first_tokens.add(token_id)
                        if turn:
                            times[name].append(seconds)
                            sums[name] += seconds
                            num_cached[name] += cached
                    assert len(first_tokens) == 1, "the ways do not agree on a token"
                    num_prompt_tokens += len(prompt) if turn else 0
                    prompt.extend([first_tokens.pop(), *source.choices(range(100, 20000), k=TURN_TOKENS - 1)])
            for name in ways:
                ratios[name].append(sums["none"] / sums[name])
        print(f"`python -m benchmarks.kv_tiers` on {date.today()}: {describe_machine()}.\n")
        print(
            "| KV may lie in | TTFT of a returning turn, ms | times as fast as without tiers | prompt tokens cached |"
        )
        print("| --- | --- | --- | --- |")
        for name, llm in ways.items():
            host, disk = llm.stats.host, llm.stats.disk
            shown = Spread.over([1000 * each for each in times[name]]).show(0)
            cached_share = num_cached[name] / num_prompt_tokens
            print(f"| {name} | {shown} | {Spread.over(ratios[name]).show(1)} | {cached_share:.0%} |")
            if host.num_blocks:
                print(
                    f"{name}: saved {host.num_saved_blocks} and {disk.num_saved_blocks} blocks, "
                    f"hit {host.num_hit_tokens} and {disk.num_hit_tokens} tokens in host memory and on disk"
                )


if __name__ == "__main__":
    main()
