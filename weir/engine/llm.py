"""The offline API: one model in this process, prompts in, finished generations out. No service, no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.core.errors import InvalidRequestError, WeirError
from weir.core.request import FinishReason, RequestId, SamplingParams, SequenceRequest, TokenLogprobs
from weir.engine.cold_blocks import LOAD_POLL_S, open_cold_blocks
from weir.engine.config import EngineConfig
from weir.engine.engine import Engine
from weir.engine.outbox import News
from weir.engine.stats import EngineStats
from weir.engine.step_computation import Runner, load_model_runner
from weir.engine.token_stream import SequenceNews

if TYPE_CHECKING:
    from weir.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Generation:
    """One prompt and what the model made of it.

    Attributes:
        text: the output as text, special tokens left out; empty until the generation is finished.
        logprobs: one for each output token, when asked for.
        prompt_logprobs: for prompt positions 1 and up, when asked for.
        num_cached_tokens: prompt tokens that the prefix cache gave.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0


class LLM:
    """A model that generates in this process. Not safe to share between threads.

    Args:
        model_dir: a prepared model directory (`python -m weir.engine.prepare`).
        load_runner: makes the model.
        settings: fields of `EngineConfig`.

    Raises:
        ConfigError, ModelLoadError: a setting, or the checkpoint.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        load_runner: Callable[[EngineConfig], Runner] = load_model_runner,
        **settings: Any,
    ) -> None:
        if isinstance(cache_dir := settings.get("kernel_cache_dir"), str):
            settings["kernel_cache_dir"] = Path(cache_dir)
        config = EngineConfig(model_dir=Path(model_dir), **settings)
        self._model_dir = config.model_dir
        runner = load_runner(config)
        runner.warm_up()
        cold = open_cold_blocks(config, runner.cache)
        self._engine = Engine(runner, config, deliver=self._collect, cold=cold)
        self._tokenizer: Tokenizer | None = None
        self._open: dict[str, Generation] = {}
        self._error: WeirError | None = None
        self._num_generations = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read on first use.

        Raises:
            ModelLoadError: the directory has none, or a broken one.
        """
        if self._tokenizer is None:
            from weir.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self._model_dir)
        return self._tokenizer

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Generate for all prompts together, batched; one result for each, in order.

        The result of a prompt depends on the prompt and its parameters alone: equal seeds give equal outputs.

        Args:
            prompts: texts, or token ids; then no text is made and no tokenizer is needed.
            sampling: for all prompts, or one for each; None is the default of `SamplingParams`.

        Raises:
            InvalidRequestError: a prompt that can never run; then nothing was generated.
            HopFailedError: the model could not compute a sequence.
        """
        if isinstance(prompts, str):
            raise InvalidRequestError("prompts is a list of prompts, not one text", param="prompts")
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts and {len(sampling)} sampling parameters", param="sampling"
            )
        try:
            generations = [self._start(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
            while self._open and self._error is None:
                if not self._engine.step() and self._open:
                    assert self._engine.is_loading, "sequences wait for blocks that nobody has"
                    time.sleep(LOAD_POLL_S)
            if self._error is not None:
                raise self._error
        finally:
            for sequence_id in self._open:
                self._engine.abort(sequence_id)
            self._open.clear()
            self._error = None
        for generation, prompt in zip(generations, prompts, strict=True):
            if isinstance(prompt, str):
                generation.text = self.tokenizer.decode(generation.token_ids)
        return generations

    @property
    def stats(self) -> EngineStats:
        """What the engine says of itself after its latest step."""
        return self._engine.stats

    def check_integrity(self) -> None:
        """Raises AssertionError: says which law of the engine is broken."""
        self._engine.check_integrity()

    def _start(self, prompt: str | Sequence[int], sampling: SamplingParams) -> Generation:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self._num_generations += 1
        sequence_id = str(self._num_generations)
        generation = Generation(prompt_token_ids=token_ids)
        request = SequenceRequest(
            request_id=RequestId(sequence_id),
            sequence_id=sequence_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
        )
        self._engine.submit(request, generation)
        self._open[sequence_id] = generation
        return generation

    def _collect(self, news: list[tuple[Any, News]]) -> None:
        for generation, item in news:
            assert isinstance(item, SequenceNews)
            if item.delta is None:
                self._error = item.error
                continue
            generation.token_ids.extend(item.delta.token_ids)
            generation.logprobs.extend(item.delta.logprobs)
            generation.prompt_logprobs += item.prompt_logprobs
            generation.num_cached_tokens = item.delta.num_cached_tokens
            generation.finish_reason = item.delta.finish_reason
            generation.stop_token_id = item.delta.stop_token_id
            if item.is_last:
                del self._open[item.sequence_id]
