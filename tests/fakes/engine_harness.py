"""An `Engine` over the fake model, stepped by hand, with its news sorted by sequence."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.late_copies import LateCopies, LateDevice, LateExecutor
from tests.fakes.model_runner import FakeModelRunner, expected_output, make_config
from weir.core.errors import WeirError
from weir.core.request import FinishReason, SequenceRequest, TokenLogprobs
from weir.engine.cold_blocks import ColdBlocks
from weir.engine.engine import Engine
from weir.engine.outbox import News
from weir.engine.prefill_run import PrefillProgress
from weir.engine.sequence import PrefillChoice
from weir.engine.token_stream import SequenceNews


class EngineHarness:
    """Settings are those of `EngineConfig`. Readers are the sequence ids themselves.

    Args:
        num_host_slots, num_disk_slots: blocks of the tiers under the pool; runs of any length are brought back.

    Attributes:
        runs_ahead: of the class: whether a new harness, unless told otherwise, launches a step before it takes the
            results of the one before.
        device, saves, loads, disk: what moves blocks between tiers, when a test says so.
        now_s: the engine's clock.
        tokens, finish, errors, prompt_logprobs: what each sequence has heard.
        progress: of each prefill, everything it has heard.
    """

    runs_ahead = False

    def __init__(
        self,
        *,
        runs_ahead: bool | None = None,
        num_host_slots: int = 0,
        num_disk_slots: int = 0,
        **settings: object,
    ) -> None:
        config = make_config(**settings)
        self.runner = FakeModelRunner(config, runs_ahead=self.runs_ahead if runs_ahead is None else runs_ahead)
        self.now_s = 0.0
        self.device, self.disk = LateDevice(), LateExecutor()
        self.saves, self.loads = LateCopies(self.device), LateCopies(self.device)
        self.runner.before_execute = self.device.begin_step
        self.cold: ColdBlocks | None = None
        if num_host_slots:
            self.cold = ColdBlocks(
                self.runner.cache,
                self.saves,
                self.loads,
                num_host_slots=num_host_slots,
                num_disk_slots=num_disk_slots,
                disk_directory=Path(tempfile.gettempdir()),
                executor=self.disk,
                min_loaded_tokens=1,
                clock=lambda: self.now_s,
            )
        self.engine = Engine(self.runner, config, deliver=self._collect, cold=self.cold, clock=lambda: self.now_s)
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
        """Step until nothing can be computed; what is moved between tiers comes when nothing else can be done."""
        for _ in range(max_steps):
            self.now_s += 1
            if not self.engine.step():
                if not self.engine.is_loading:
                    break
                self.disk.do()
                self.loads.do()
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
