"""What the world is told of one prompt: the request journal, the metrics, the log and its trace.

The journal gets the state by the furthest of the prompt's choices, and only moves that it would accept, so that a
prompt costs a handful of records whatever happens. Nothing here decides anything, and nothing waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.trace import Span

from gateway.attempt import Milestone
from gateway.choice_run import ChoiceRun
from gateway.metrics import RequestTimeline
from gateway.prompt_request import PromptRequest
from gateway.router import Route
from weir.cluster.request_journal import RequestFailure, RequestRecord, RequestState
from weir.core.errors import RequestCancelledError, WeirError
from weir.core.request import FinishReason
from weir.core.worker import WorkerId, WorkerInfo

logger = logging.getLogger(__name__)

_STATE_OF_MILESTONE = {
    Milestone.GRANTED: RequestState.PREFILLING,
    Milestone.SEALED: RequestState.SEALED,
    Milestone.DECODING: RequestState.DECODING,
}
_WORST_LAST = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


class Journal(Protocol):
    """The part of `weir.cluster.request_journal.RequestJournal` that writes; never waits."""

    def record(self, record: RequestRecord) -> None: ...


class PromptReport:
    """Speaks for one prompt, in the name of the gateway that owns it."""

    def __init__(self, prompt: PromptRequest, timeline: RequestTimeline, journal: Journal, *, owner: str) -> None:
        self.timeline = timeline
        self._prompt = prompt
        self._journal = journal
        self._owner = owner
        self._created_s = int(time.time())
        self._newest = (-1, 0)
        self._prefill_worker: WorkerId | None = None
        self._decode_worker: WorkerId | None = None
        self._num_cached_tokens = 0
        self._finish_reasons: tuple[FinishReason, ...] = ()

    def on_dispatch(self, epoch: int, route: Route) -> None:
        """Choices were sent to workers, at this epoch."""
        self._prefill_worker = None if route.prefill is None else route.prefill.worker_id
        self._decode_worker = route.decode.worker_id
        self._move(epoch, RequestState.QUEUED)

    def on_moved(self, decode: WorkerInfo) -> None:
        """A choice was denied, and is asked of another decode worker; told with the next step."""
        self._decode_worker = decode.worker_id

    def on_milestone(self, choice: ChoiceRun, milestone: Milestone) -> None:
        """A choice has come so far."""
        self._num_cached_tokens = max(self._num_cached_tokens, choice.num_cached_tokens)
        state = _STATE_OF_MILESTONE.get(milestone)
        if state is not None:
            self._move(choice.epoch, state)

    def on_end(self, choices: Sequence[ChoiceRun], error: WeirError | None, span: Span) -> None:
        """The prompt is over: every choice has ended, or `error` ended it, or else its client has left."""
        self._finish_reasons = tuple(choice.finish_reason for choice in choices if choice.finish_reason is not None)
        self._num_cached_tokens = max(choice.num_cached_tokens for choice in choices)
        if len(self._finish_reasons) == len(choices):
            state, reason = RequestState.DONE, max(self._finish_reasons, key=_WORST_LAST.index).value
        elif error is None or isinstance(error, RequestCancelledError):
            state, reason = RequestState.CANCELLED, FinishReason.ABORT.value
        else:
            state, reason = RequestState.FAILED, "error"
        self.timeline.finish(reason)
        self._move(max(0, self._newest[0]), state, error if state is RequestState.FAILED else None)
        span.set_attribute("gen_ai.usage.input_tokens", len(self._prompt.prompt_token_ids))
        span.set_attribute("gen_ai.usage.output_tokens", self.timeline.num_generated_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
        self._log_end(state, reason, error)

    def _move(self, epoch: int, state: RequestState, error: WeirError | None = None) -> None:
        if (epoch, state.rank) <= self._newest:
            return
        self._newest = (epoch, state.rank)
        prompt = self._prompt
        self._journal.record(
            RequestRecord(
                request_id=prompt.request_id,
                owner=self._owner,
                state=state,
                epoch=epoch,
                model=prompt.card.name,
                label=prompt.label,
                created_s=self._created_s,
                prefill_worker=self._prefill_worker,
                decode_worker=self._decode_worker,
                deadline=prompt.deadline,
                num_choices=prompt.n,
                num_prompt_tokens=len(prompt.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens,
                num_output_tokens=self.timeline.num_generated_tokens,
                finish_reasons=self._finish_reasons,
                timings=self.timeline.timings,
                failure=None if error is None else RequestFailure.from_error(error),
            )
        )

    def _log_end(self, state: RequestState, reason: str, error: WeirError | None) -> None:
        timings = self.timeline.timings
        fields = {
            "request_id": self._prompt.request_id,
            "state": state.value,
            "reason": reason,
            "model": self._prompt.card.name,
            "label": self._prompt.label,
            "num_prompt_tokens": len(self._prompt.prompt_token_ids),
            "num_output_tokens": self.timeline.num_generated_tokens,
            "first_token_s": timings.first_token_s,
            "total_s": timings.total_s,
        }
        if error is not None:
            fields |= {"hop": error.hop, "error": error.message}
        logger.info("request ended", extra=fields)


def describe_request(span: Span, prompt: PromptRequest) -> None:
    """What is known of a prompt when its trace begins, under OpenTelemetry's GenAI names."""
    span.set_attribute("gen_ai.operation.name", "text_completion")
    span.set_attribute("gen_ai.request.model", prompt.card.name)
    span.set_attribute("gen_ai.request.max_tokens", prompt.sampling.max_tokens)
    span.set_attribute("gen_ai.request.temperature", prompt.sampling.temperature)
    span.set_attribute("gen_ai.request.top_p", prompt.sampling.top_p)
    span.set_attribute("gen_ai.request.choice.count", prompt.n)
    span.set_attribute("gen_ai.response.id", prompt.request_id)
