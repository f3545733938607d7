"""The engine's steps without any service: decoding with and without recorded graphs, and a long prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import Floor
from benchmarks.gpu_record import Row
from benchmarks.gpu_section import Begun, Message, Situation
from benchmarks.gpu_timer import step_seconds, timer_of
from benchmarks.model_floor import ModelFloor
from benchmarks.random_model import LLAMA_3_8B, prepared_random_model, small_config
from weir.core.request import SamplingParams
from weir.engine.batch import Batch, BatchArrays, ScheduledSequence
from weir.engine.config import EngineConfig
from weir.engine.model_runner import ModelRunner
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.sampler import SamplingRow, launch_sampling
from weir.engine.staging import Staging

SECTION = "engine"
LLAMA = "llama-3-8b"
GOAL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is computed."""

    batches: tuple[int, ...] = (1, 64)
    context: int = 4096
    prompt: int = 8192
    num_steps: int = 40
    num_blocks: int | None = None


SMALL = Sizes(batches=(1, 2), context=40, prompt=60, num_steps=1, num_blocks=64)


def measure(situation: Situation) -> Iterator[Message]:
    yield from measure_model(LLAMA, LLAMA_3_8B, situation, SECTION)


def measure_model(
    name: str, config: Mapping[str, Any], situation: Situation, section: str, sizes: Sizes | None = None
) -> Iterator[Message]:
    """Steps of one model with random weights."""
    sizes = sizes or (SMALL if situation.is_dry else Sizes())
    yield Begun(f"{name}, loading")
    device = torch.device(situation.device)
    directory = prepared_random_model(
        name, small_config(config) if situation.is_dry else config, situation.scratch, device
    )
    floor = ModelFloor(DecoderConfig.load(directory))
    steps = EngineSteps(load_runner(directory, situation, sizes), floor, situation, sizes, name, section)
    for batch in sizes.batches:
        yield Begun(f"{name}, decode step, batch {batch}")
        yield from steps.decode(batch)
    yield Begun(f"{name}, prefill")
    yield steps.prefill()


def load_runner(directory: Path, situation: Situation, sizes: Sizes) -> ModelRunner:
    runner = ModelRunner(
        EngineConfig(
            model_dir=directory,
            device=situation.device,
            dtype="bfloat16",
            num_blocks=sizes.num_blocks,
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=sizes.prompt,
            max_model_len=max(sizes.prompt, sizes.context),
            device_claim_dir=situation.scratch / "devices",
            kernel_cache_dir=None,
        )
    )
    runner.cache.tensor.normal_()
    return runner


class EngineSteps:
    """Times the steps of one runner."""

    def __init__(
        self, runner: ModelRunner, floor: ModelFloor, situation: Situation, sizes: Sizes, name: str, section: str
    ) -> None:
        self._runner = runner
        self._floor = floor
        self._situation = situation
        self._sizes = sizes
        self._name = name
        self._section = section
        self._device = torch.device(situation.device)
        self._timer = timer_of(self._device)
        self._staging = Staging(self._device)

    def decode(self, batch: int) -> Iterator[Row]:
        """The model as it runs, the same with the choice of tokens, and without graphs."""
        context, block_size = self._sizes.context, self._runner.layout.block_size
        blocks_each = -(-context // block_size)
        batch = min(batch, self._runner.num_blocks // blocks_each)
        items = [
            ScheduledSequence(
                sequence_id=str(index),
                token_ids=(5 + index,),
                start=context - 1,
                block_ids=range(index * blocks_each, (index + 1) * blocks_each),
                num_logits=1,
            )
            for index in range(batch)
        ]
        choices = [
            SamplingRow(
                logits_row=index,
                params=SamplingParams(temperature=0),
                choice_index=0,
                token_ids=(5,),
                num_prompt_tokens=1,
                position=context,
            )
            for index in range(batch)
        ]
        arrays = BatchArrays.from_scheduled(items, block_size)

        def with_choice() -> object:
            return launch_sampling(self._runner.execute(items), choices, self._runner.plan)

        def without_graphs() -> object:
            with torch.inference_mode():
                return self._runner.compute(Batch.on_device(arrays, self._staging))

        floor = self._floor.decode(batch, context)
        shape = f"{batch} sequences of {context:,} tokens"
        for way, step in (
            ("whole step, tokens chosen", with_choice),
            ("model alone", partial(self._runner.execute, items)),
            ("model alone, no graphs", without_graphs),
        ):
            seconds = step_seconds(step, self._timer, num_steps=self._sizes.num_steps)
            goal = GOAL if step is with_choice else None
            yield self._row(f"decode step, batch {batch}, {way}", shape, seconds, floor, batch, goal)

    def prefill(self) -> Row:
        num_tokens = self._sizes.prompt
        item = ScheduledSequence(
            sequence_id="prompt",
            token_ids=tuple(3 + index % 400 for index in range(num_tokens)),
            start=0,
            block_ids=range(self._runner.layout.blocks_for(num_tokens)),
            num_logits=1,
        )
        num_steps = max(1, self._sizes.num_steps // 10)
        seconds = step_seconds(partial(self._runner.execute, [item]), self._timer, num_steps=num_steps)
        floor = self._floor.prefill(num_tokens)
        return self._row("prefill", f"one prompt of {num_tokens:,} tokens", seconds, floor, num_tokens)

    def _row(
        self, what: str, shape: str, seconds: float, floor: Floor, num_tokens: int, goal: float | None = None
    ) -> Row:
        return Row(
            section=self._section,
            name=f"{self._name}, {what}",
            shape=shape,
            figure=seconds,
            unit="s",
            num_bytes=floor.num_bytes,
            flops=floor.flops,
            share=self._situation.share(floor, seconds),
            goal=goal,
            remark=f"{num_tokens / seconds:,.0f} tokens a second",
        )
