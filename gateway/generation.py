"""All choices of one request through the pipeline: prompts side by side, tokens to text, counts.

It knows neither HTTP nor JSON: a sink takes what each step adds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.choices import ChoiceAssembler, ChoiceDelta, ChoiceFormat
from gateway.generation_stream import ChoiceNews, GenerationStream
from gateway.pipeline import GenerationPipeline
from gateway.prompt_request import PromptRequest
from weir.core.request import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request; every prompt is counted once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerationSink(Protocol):
    async def start(self) -> None:
        """Every prompt was taken on by its workers: what fails from now on fails in mid-answer."""

    async def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        """What one step of one prompt adds; waits while the reader is slow."""


class Generation:
    """One run of `prompts` x n choices; prompt i owns the choices i * n and up.

    Attributes:
        num_choices: over all prompts.
        prompt_logprobs: of each prompt, for positions 1 and up; empty until its first tokens, or when not asked for.
    """

    def __init__(
        self, pipeline: GenerationPipeline, prompts: Sequence[PromptRequest], choice_format: ChoiceFormat
    ) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._n = prompts[0].n
        self.num_choices = len(prompts) * self._n
        self._assemblers = [ChoiceAssembler(choice_format, index) for index in range(self.num_choices)]
        self._num_outside = len(prompts)
        self._all_inside = asyncio.Event()
        self.prompt_logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(prompts)

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        n = self._n
        return Usage(
            prompt_tokens=sum(len(prompt.prompt_token_ids) for prompt in self._prompts),
            completion_tokens=sum(assembler.num_tokens for assembler in self._assemblers),
            cached_tokens=sum(
                max(assembler.num_cached_tokens for assembler in self._assemblers[i * n : i * n + n])
                for i in range(len(self._prompts))
            ),
        )

    async def run(self, sink: GenerationSink) -> None:
        """Take every choice to its end.

        Each prompt has its own task, also a lone one: a token then wakes two frames and not the server's whole stack.

        Raises:
            BaseExceptionGroup: a prompt failed; the others were cancelled.
        """
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._prompts)):
                group.create_task(self._run_prompt(index, sink))

    async def _run_prompt(self, prompt_index: int, sink: GenerationSink) -> None:
        async with self._pipeline.generate(self._prompts[prompt_index]) as stream:
            self._num_outside -= 1
            if self._num_outside == 0:
                await sink.start()
                self._all_inside.set()
            else:
                await self._all_inside.wait()
            while news := await stream.read():
                await sink.write([self._take(prompt_index, item, stream) for item in news])

    def _take(self, prompt_index: int, news: ChoiceNews, stream: GenerationStream) -> ChoiceDelta:
        if news.prompt_logprobs and not self.prompt_logprobs[prompt_index]:
            self.prompt_logprobs[prompt_index] = news.prompt_logprobs
        delta = self._assemblers[prompt_index * self._n + news.choice_index].push(news.delta)
        if delta.finish_reason is not None and news.delta.finish_reason is None:
            stream.finish_choice(news.choice_index)
        return delta
