"""An `Engine` over the fake model, stepped by hand, with its news sorted by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fakes.model_runner import FakeModelRunner, expected_output, make_config
from weir.core.errors import WeirError
from weir.core.request import FinishReason, SequenceRequest, TokenLogprobs
from weir.engine.engine import Engine
from weir.engine.outbox import News
from weir.engine.prefill_run import PrefillProgress
from weir.engine.sequence import PrefillChoice
from weir.engine.token_stream import SequenceNews


class EngineHarness:
    """Settings are those of `EngineConfig`. Readers are the sequence ids themselves.

    Attributes:
        runs_ahead: of the class: whether a new harness, unless told otherwise, launches a step before it takes the
            results of the one before.
        now_s: the engine's clock.
        tokens, finish, errors, prompt_logprobs: what each sequence has heard.
        progress: of each prefill, everything it has heard.
    """

    runs_ahead = False

    def __init__(self, *, runs_ahead: bool | None = None, **settings: object) -> None:
        config = make_config(**settings)
        self.runner = FakeModelRunner(config, runs_ahead=self.runs_ahead if runs_ahead is None else runs_ahead)
        self.now_s = 0.0
        self.engine = Engine(self.runner, config, deliver=self._collect, clock=lambda: self.now_s)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.cached: dict[str, int] = {}
        self.finish: dict[str, FinishReason] = {}
        self.errors: dict[str, WeirError] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.progress: dict[str, list[PrefillProgress]] = {}

    def submit(self, *requests: SequenceRequest) -> None:
        for request in requests:
            self.engine.submit(request, request.sequence_id)

    def prefill(self, request: SequenceRequest, *choice_indices: int) -> None:
        choices = tuple(
            PrefillChoice(choice_index=index, hold_id=f"{request.sequence_id}#{index}") for index in choice_indices
        )
        self.engine.prefill(request, choices, request.sequence_id)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += 1
            self.engine.step()
            self.engine.check_integrity()

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing can be computed."""
        for _ in range(max_steps):
            self.now_s += 1
            if not self.engine.step():
                break
        else:
            raise AssertionError("the engine does not come to an end")
        self.engine.check_integrity()

    def check_outputs(self, requests: Sequence[SequenceRequest]) -> None:
        """Every request has exactly the output that it would have alone, without any engine."""
        for request in requests:
            output, finish = expected_output(request)
            resumed = len(request.resumed_output_token_ids)
            assert self.tokens[request.sequence_id] == output[resumed:], request.sequence_id
            assert self.finish[request.sequence_id] is finish

    @property
    def num_free_blocks(self) -> int:
        return self.engine.stats.free_blocks

    def _collect(self, news: list[tuple[Any, News]]) -> None:
        for reader, item in news:
            match item:
                case PrefillProgress():
                    self.progress.setdefault(reader, []).append(item)
                case SequenceNews():
                    self._collect_sequence(item)
                case _:
                    self.errors[reader] = item

    def _collect_sequence(self, news: SequenceNews) -> None:
        name = news.sequence_id
        assert name not in self.finish, "news after the end"
        assert name not in self.errors, "news after the end"
        self.prompt_logprobs.setdefault(name, []).extend(news.prompt_logprobs)
        if news.error is not None:
            self.errors[name] = news.error
        if news.delta is not None:
            tokens = self.tokens.setdefault(name, [])
            if not tokens:
                self.cached[name] = news.delta.num_cached_tokens
            tokens.extend(news.delta.token_ids)
            self.logprobs.setdefault(name, []).extend(news.delta.logprobs)
            if news.delta.finish_reason is not None:
                self.finish[name] = news.delta.finish_reason
