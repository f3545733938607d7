"""A generation pipeline without workers: it plays tokens that a test wrote down, one step a read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from gateway.generation_stream import ChoiceNews
from gateway.prompt_request import PromptRequest
from tests.fakes.worker_clients import FakeWorkerClients
from weir.core.errors import WeirError
from weir.core.request import FinishReason, TokenDelta, TokenLogprobs

Step = Sequence[ChoiceNews] | WeirError | asyncio.Event
"""What one read gives: news, a failure, or first a wait."""


class FakePipeline:
    """Plays `script(prompt)` for each prompt.

    Attributes:
        prompts: those that were asked for, in order.
        num_inside: prompts that are entered and not left.
        finished_choices: choices that the reader ended itself, as (request id, choice index).
        gate: set: a prompt is entered only once it is set.
        refusal: raised instead of entering.
        left: set whenever a prompt was left.
    """

    def __init__(self, script: Callable[[PromptRequest], Sequence[Step]]) -> None:
        self.script = script
        self.clients = FakeWorkerClients()
        self.prompts: list[PromptRequest] = []
        self.num_inside = 0
        self.finished_choices: list[tuple[str, int]] = []
        self.gate: asyncio.Event | None = None
        self.refusal: WeirError | None = None
        self.asked = asyncio.Event()
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    @asynccontextmanager
    async def generate(self, prompt: PromptRequest) -> AsyncIterator[FakeStream]:
        self.prompts.append(prompt)
        self.num_inside += 1
        self.asked.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.refusal is not None:
                raise self.refusal
            self.entered.set()
            yield FakeStream(self, prompt, self.script(prompt))
        finally:
            self.num_inside -= 1
            self.left.set()


class FakeStream:
    """One prompt's steps, in order; those of ended choices are left out, as the pipeline does."""

    def __init__(self, pipeline: FakePipeline, prompt: PromptRequest, steps: Sequence[Step]) -> None:
        self._pipeline = pipeline
        self._prompt = prompt
        self._steps = list(reversed(steps))
        self._open = set(range(prompt.n))

    async def read(self) -> tuple[ChoiceNews, ...]:
        while self._steps and self._open:
            step = self._steps.pop()
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, WeirError):
                raise step
            else:
                await asyncio.sleep(0)
                news = tuple(item for item in step if item.choice_index in self._open)
                self._open -= {item.choice_index for item in news if item.delta.finish_reason is not None}
                if news:
                    return news
        return ()

    def finish_choice(self, choice_index: int) -> None:
        self._open.discard(choice_index)
        self._pipeline.finished_choices.append((self._prompt.request_id, choice_index))


def play(
    token_ids: Sequence[int],
    prompt: PromptRequest,
    *,
    stop_token_id: int | None = None,
    num_cached_tokens: int = 0,
    tokens_a_step: int = 1,
) -> list[list[ChoiceNews]]:
    """The steps of an engine that makes `token_ids` for every choice, within `max_tokens`, with made-up log-probs.

    The sequence ends with `stop_token_id` if given, else by length.
    """
    sampling = prompt.sampling
    ids = [*token_ids] if stop_token_id is None else [*token_ids, stop_token_id]
    ids = ids[: sampling.max_tokens]
    is_stopped = stop_token_id is not None and ids[-1] == stop_token_id
    steps: list[list[ChoiceNews]] = []
    for first in range(0, len(ids), tokens_a_step):
        some = tuple(ids[first : first + tokens_a_step])
        is_last = first + tokens_a_step >= len(ids)
        delta = TokenDelta(
            first_index=first,
            token_ids=some,
            logprobs=() if sampling.logprobs is None else tuple(logprobs_of(i, sampling.logprobs) for i in some),
            finish_reason=None if not is_last else FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            stop_token_id=stop_token_id if is_last and is_stopped else None,
            num_cached_tokens=num_cached_tokens,
        )
        known: tuple[TokenLogprobs, ...] = ()
        if first == 0 and sampling.prompt_logprobs is not None:
            known = tuple(logprobs_of(i, sampling.prompt_logprobs) for i in prompt.prompt_token_ids[1:])
        steps.append([ChoiceNews(choice_index=k, delta=delta, prompt_logprobs=known) for k in range(prompt.n)])
    return steps


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """The token itself is the likeliest, its neighbours follow; every figure is exact in binary."""
    tops = [token_id, *(token_id + 1 + offset for offset in range(num_top - 1))][:num_top]
    return TokenLogprobs(
        token_id=token_id,
        logprob=-0.25,
        rank=1,
        top_token_ids=tuple(tops),
        top_logprobs=tuple(-0.25 * (rank + 1) for rank in range(len(tops))),
    )
