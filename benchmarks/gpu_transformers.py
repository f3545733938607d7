"""transformers' paged continuous batching, as it comes and without a server, with the same weights and prompts as long:
beside the figures of `benchmarks.gpu_services`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from benchmarks.gpu_engine import LLAMA
from benchmarks.gpu_record import Row
from benchmarks.gpu_section import Begun, Message, Situation
from benchmarks.gpu_services import Loads
from benchmarks.random_model import LLAMA_3_8B, prepared_random_model, small_config

SECTION = "transformers"
NO_END = -1
WAIT_S = 60.0


def measure(situation: Situation) -> Iterator[Message]:
    logging.disable_progress_bar()
    loads = Loads.of(situation)
    yield Begun("loading")
    device = torch.device(situation.device)
    config = small_config(LLAMA_3_8B) if situation.is_dry else LLAMA_3_8B
    prepared_random_model(LLAMA, config, situation.scratch, device)
    source = situation.scratch / LLAMA
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True).to(device)
    model.eval()
    generation = GenerationConfig(
        max_new_tokens=loads.wide.output_tokens, do_sample=False, eos_token_id=NO_END, pad_token_id=0
    )
    # It takes what memory there is, which on a host is too much.
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=256) if situation.is_dry else None
    prompts = Prompts(config["vocab_size"])
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        yield Begun("one prompt")
        long, wide = loads.long, loads.wide
        generate(manager, prompts.draw(1, long.input_tokens), 1)
        times = [generate(manager, prompts.draw(1, long.input_tokens), 1) for _ in range(1 if situation.is_dry else 3)]
        yield Row(
            section=SECTION,
            name="time to first token, p50",
            shape=f"1 stream, {long.input_tokens:,} in",
            figure=statistics.median(times),
            unit="s",
        )
        yield Begun("many streams")
        generate(manager, prompts.draw(wide.streams, wide.input_tokens), wide.output_tokens)
        seconds = generate(manager, prompts.draw(wide.streams, wide.input_tokens), wide.output_tokens)
        yield Row(
            section=SECTION,
            name="output tokens a second",
            shape=f"{wide.streams} at once, {wide.input_tokens:,} in, {wide.output_tokens} out",
            figure=wide.streams * wide.output_tokens / seconds,
            unit="tok/s",
        )


class Prompts:
    """Random token ids, no two prompts alike."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)

    def draw(self, count: int, num_tokens: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(
            3, self._vocab_size, (count, num_tokens), generator=self._generator
        ).tolist()
        return ids


def generate(manager: Any, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds until all prompts have had `num_tokens` each.

    Raises:
        RuntimeError: one has not.
    """
    started_s = time.monotonic()
    manager.add_requests(inputs=prompts, max_new_tokens=num_tokens)
    left = len(prompts)
    while left:
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running() or time.monotonic() - started_s > WAIT_S:
                raise RuntimeError(f"{left} of {len(prompts)} requests had no answer")
        elif result.is_finished():
            if result.error is not None or len(result.generated_tokens) != num_tokens:
                raise RuntimeError(f"{len(result.generated_tokens)} of {num_tokens} tokens: {result.error}")
            left -= 1
    return time.monotonic() - started_s
