"""The one place that says what disaggregation is: a prompt goes through a prefill and a decode worker, or through a
decode worker alone, and its client sees every token once.

For each choice: open on the decode worker and compute on the prefill worker at the same time; give the client the first
token as soon as either says it; move to another decode worker when one is full; start again with the next epoch, from
the tokens that were sent, when a worker fails. It knows workers through `worker_protocols` only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from opentelemetry.trace import Span

from gateway.attempt import Attempt, Milestone
from gateway.choice_run import ChoiceRun
from gateway.generation_stream import ChoiceNews, GenerationStream
from gateway.in_flight import InFlightLedger
from gateway.metrics import RequestMetrics
from gateway.prefill_call import PrefillCall
from gateway.prompt_report import Journal, PromptReport, describe_request
from gateway.prompt_request import PromptRequest
from gateway.router import RouteQuery, Router
from gateway.worker_protocols import WorkerClients
from weir.core.block_hash import BlockHash, hash_blocks, root_hash
from weir.core.deadline import Deadline
from weir.core.errors import (
    ConflictError,
    DeadlineExceededError,
    HopFailedError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    WeirError,
    find_error,
)
from weir.core.request import HandoffId, RequestId, SequenceRequest
from weir.core.worker import Incarnation, WorkerId, WorkerInfo
from weir.runtime.tracing import tracer

__all__ = ["ChoiceNews", "GenerationPipeline", "GenerationStream", "PipelineSettings", "PromptRequest"]

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 2.0
"""Pauses before a choice's second, third and further re-dispatch; the first is at once."""


class PrefixIndex(Protocol):
    """The part of `weir.cluster.kv_index.KvIndex` that routes need; answers from memory."""

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Bounds of every wait (see handoff.md, rules 7, 10 and 13).

    Attributes:
        header_wait_s: how long `generate` waits for decode workers to grant before it is entered anyway.
        redispatch_wait_s: how long a stream without a worker waits for one.
        max_dispatches: attempts of one choice.
        renew_interval_s: a sixth of the prefill workers' lease.
        max_buffered_tokens: tokens of a prompt that may wait for its reader.
        needs_redis: refuse new requests while Redis is away, instead of routing from what is known.
    """

    header_wait_s: float = 10.0
    redispatch_wait_s: float = 30.0
    max_dispatches: int = 4
    renew_interval_s: float = 5.0
    max_buffered_tokens: int = 16_384
    needs_redis: bool = False


class GenerationPipeline:
    """Turns prompts into streams of tokens.

    Args:
        gateway_id: the owner of its requests in the journal.
        is_redis_up: whether this gateway's link to Redis works now.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        clients: WorkerClients,
        router: Router,
        prefix_index: PrefixIndex,
        journal: Journal,
        metrics: RequestMetrics,
        is_redis_up: Callable[[], bool],
        settings: PipelineSettings,
    ) -> None:
        self.gateway_id = gateway_id
        self.clients = clients
        self.router = router
        self.prefix_index = prefix_index
        self.journal = journal
        self.metrics = metrics
        self.settings = settings
        self.in_flight = InFlightLedger()
        self._is_redis_up = is_redis_up
        self._running: dict[RequestId, _PromptRun] = {}

    @property
    def num_running(self) -> int:
        """Prompts that have not ended."""
        return len(self._running)

    @asynccontextmanager
    async def generate(self, prompt: PromptRequest) -> AsyncIterator[GenerationStream]:
        """Run a prompt for as long as the body does; leaving it ends what is left on both workers.

        Entered once decode workers have granted every choice, or after `header_wait_s`: until then a refusal is raised
        here, later it is raised by the stream.

        Raises:
            UnavailableError: no worker, or Redis is away and needed.
            InvalidRequestError: the prompt can never be served.
            WeirError: whatever else ended it before it was entered.
        """
        if self.settings.needs_redis and not self._is_redis_up():
            self.metrics.count_rejection("redis_away", model=prompt.card.name)
            raise UnavailableError("new requests wait for Redis to come back", hop="gateway", retry_after_s=2.0)
        run = _PromptRun(self, prompt)
        with tracer().start_as_current_span("request") as span:
            describe_request(span, prompt)
            attempts = run.plan(run.choices)
            self._running[prompt.request_id] = run
            try:
                async with _running_beside(run.drive(attempts)):
                    await run.wait_until_open()
                    yield run.stream
            finally:
                del self._running[prompt.request_id]
                run.end(span)

    def abort(self, name: str) -> int:
        """End the prompts of a request here, by its id or its client's label; returns how many there were."""
        found = [run for run in self._running.values() if name in (run.prompt.request_id, run.prompt.label)]
        for run in found:
            run.stop(RequestCancelledError("the request was aborted", hop="gateway"))
        return len(found)

    def fail_all(self, error: WeirError) -> int:
        """End every prompt here with `error`; returns how many there were."""
        for run in self._running.values():
            run.stop(error)
        return len(self._running)


class _PromptRun:
    """One prompt on its way: its choices, and the tasks that bring them through their workers."""

    def __init__(self, pipeline: GenerationPipeline, prompt: PromptRequest) -> None:
        self.prompt = prompt
        self.stream = GenerationStream(
            prompt.n,
            max_buffered_tokens=pipeline.settings.max_buffered_tokens,
            on_finish=self._finish_choice,
        )
        self._pipeline = pipeline
        self._settings = pipeline.settings
        timeline = pipeline.metrics.start(prompt)
        self._report = PromptReport(prompt, timeline, pipeline.journal, owner=pipeline.gateway_id)
        self.choices = [
            ChoiceRun(index, HandoffId(uuid.uuid4().hex), self.stream, on_tokens=timeline.on_tokens)
            for index in range(prompt.n)
        ]
        self._attempts: dict[int, Attempt] = {}
        self._choice_tasks: dict[int, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()
        self._not_open = set(range(prompt.n))
        self._opened = asyncio.Event()

    async def wait_until_open(self) -> None:
        """Return once every choice is granted or has ended, or `header_wait_s` is over; raise what ended it before."""
        try:
            async with asyncio.timeout(self._settings.header_wait_s):
                await self._opened.wait()
        except TimeoutError:
            logger.info("the header leaves before every choice is granted")
        if self.stream.error is not None:
            raise self.stream.error

    async def drive(self, attempts: Sequence[Attempt]) -> None:
        """Bring every choice to its end. Raises nothing: what goes wrong is the stream's error."""
        remaining_s = self.prompt.deadline.remaining_s()
        try:
            async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s):
                async with self._tasks as tasks:
                    self._start_prefill(attempts)
                    for attempt in attempts:
                        index = attempt.choice.choice_index
                        self._choice_tasks[index] = tasks.create_task(self._run_choice(attempt))
        except TimeoutError:
            self.stream.fail(DeadlineExceededError("the request's deadline has passed", hop=self._slowest_hop()))
        except Exception as exc:
            error = find_error(exc, WeirError)
            if error is None:
                logger.exception("a fault of the gateway's own")
                error = HopFailedError("the gateway failed on this request; its log says why", hop="gateway")
            self.stream.fail(error)
        finally:
            self._opened.set()

    def plan(self, choices: Sequence[ChoiceRun]) -> list[Attempt]:
        """The next attempt of choices whose known tokens are the same; counted as load, sent to nobody yet.

        Raises NoWorkerError or CapacityExceededError.
        """
        pipeline = self._pipeline
        route = pipeline.router.choose(self._query(choices), pipeline.clients.fleet, pipeline.in_flight)
        client = None if route.prefill is None else pipeline.clients.get_prefill(route.prefill)
        pipeline.metrics.count_route(route.choice)
        attempts: list[Attempt] = []
        for choice in choices:
            choice.epoch += 1
            attempt = Attempt(
                choice,
                self._request_of(choice),
                route.decode,
                pipeline.in_flight,
                on_milestone=partial(self._on_milestone, choice),
                on_handoff=self._report.timeline.on_handoff,
            )
            self._attempts[choice.choice_index] = attempt
            attempts.append(attempt)
        if client is not None:
            call = PrefillCall(
                client,
                attempts,
                pipeline.in_flight,
                num_uncached_tokens=route.num_uncached_tokens,
                renew_interval_s=self._settings.renew_interval_s,
                on_computed=self._report.timeline.on_prefilled,
            )
            for attempt in attempts:
                attempt.prefill_call = call
        self._report.on_dispatch(choices[0].epoch, route)
        return attempts

    def stop(self, error: WeirError) -> None:
        """Give up: the stream's reader gets `error`, both workers are told."""
        self.stream.fail(error)
        for choice in self.choices:
            self._end_choice(choice.choice_index)

    def end(self, span: Span) -> None:
        """Take back whatever is still with a worker, and tell how the prompt ended. Never waits."""
        for attempt in self._attempts.values():
            attempt.close()
        self._report.on_end(self.choices, self.stream.error, span)

    # One choice, from its dispatch to its end.

    async def _run_choice(self, attempt: Attempt) -> None:
        choice = attempt.choice
        while not choice.is_ended:
            try:
                await self._carry_out(attempt)
            finally:
                attempt.close()
            if attempt.error is not None and not choice.is_ended:
                attempt = await self._redispatch(attempt, attempt.error)

    async def _carry_out(self, attempt: Attempt) -> None:
        """Return once the choice has ended or the attempt has failed."""
        denied_until_s: dict[Incarnation, float] = {}
        self._open(attempt, attempt.decode)
        while not attempt.is_over:
            await attempt.wait_for_decision()
            if attempt.denied_for_s is not None:
                denied_until_s[attempt.decode.incarnation] = _now_s() + attempt.denied_for_s
                await self._open_elsewhere(attempt, denied_until_s)

    async def _open_elsewhere(self, attempt: Attempt, denied_until_s: dict[Incarnation, float]) -> None:
        """Open on another decode worker, or on a full one when its time has come; prefill's work is kept."""
        pipeline, call = self._pipeline, attempt.prefill_call
        while not attempt.is_over:
            full = {incarnation for incarnation, until_s in denied_until_s.items() if until_s > _now_s()}
            try:
                worker = pipeline.router.choose_decode(
                    self._query([attempt.choice], avoid=full),
                    pipeline.clients.fleet,
                    pipeline.in_flight,
                    prefill=None if call is None else call.worker,
                )
                if worker.incarnation in full:
                    next_s = min(denied_until_s[incarnation] for incarnation in full)
                    await attempt.wait_for_decision(timeout_s=max(0.0, next_s - _now_s()))
                    continue
                if call is not None and worker.incarnation != attempt.decode.incarnation:
                    await call.rebind(attempt, worker.incarnation)
            except WeirError as error:
                attempt.on_failed(error)
                return
            self._open(attempt, worker)
            self._report.on_moved(worker)
            return

    async def _redispatch(self, failed: Attempt, error: WeirError) -> Attempt:
        """The next epoch, from the tokens that were sent. Raises `error` when trying again is of no use."""
        choice = failed.choice
        # A conflict: the attempt before has not ended on that worker yet.
        is_worth_it = isinstance(error, (HopFailedError, UnavailableError, OverloadedError, ConflictError))
        if not is_worth_it or choice.epoch + 1 >= self._settings.max_dispatches:
            raise error
        logger.warning(
            "a choice starts again",
            extra={"hop": error.hop, "error": error.message, "epoch": choice.epoch + 1, "choice": choice.choice_index},
        )
        self._pipeline.metrics.count_redispatch(error.hop or "decode")
        choice.avoid |= failed.suspects
        if choice.epoch > 0:
            await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (choice.epoch - 1), MAX_PAUSE_S))
        (attempt,) = await self._plan_or_wait(choice)
        self._start_prefill([attempt])
        return attempt

    async def _plan_or_wait(self, choice: ChoiceRun) -> list[Attempt]:
        give_up = Deadline.after(self._settings.redispatch_wait_s)
        while True:
            try:
                return self.plan([choice])
            except NoWorkerError as error:
                try:
                    async with asyncio.timeout(give_up.remaining_s()):
                        await self._pipeline.clients.wait_for_change()
                except TimeoutError:
                    raise error from None

    def _start_prefill(self, attempts: Sequence[Attempt]) -> None:
        call = attempts[0].prefill_call
        if call is not None:
            call.start(self._tasks)

    def _open(self, attempt: Attempt, worker: WorkerInfo) -> None:
        if attempt.is_over:
            return
        try:
            client = self._pipeline.clients.get_decode(worker)
        except WeirError as error:
            attempt.on_failed(error)
        else:
            attempt.open(client)

    def _finish_choice(self, choice_index: int) -> None:
        self.choices[choice_index].finish()
        self._not_open.discard(choice_index)
        self._end_choice(choice_index)

    def _end_choice(self, choice_index: int) -> None:
        """Take a choice back from its workers, wherever it stands."""
        attempt = self._attempts.get(choice_index)
        if attempt is not None:
            attempt.close()
        task = self._choice_tasks.get(choice_index)
        if task is not None:
            task.cancel()

    def _on_milestone(self, choice: ChoiceRun, milestone: Milestone) -> None:
        self._report.on_milestone(choice, milestone)
        if milestone is not Milestone.SEALED:
            self._not_open.discard(choice.choice_index)
            if not self._not_open:
                self._opened.set()

    def _request_of(self, choice: ChoiceRun) -> SequenceRequest:
        return self.prompt.sequence(
            choice.handoff_id,
            choice.choice_index,
            tuple(choice.output_token_ids),
            wants_prompt_logprobs=not choice.has_prompt_logprobs,
        )

    def _query(self, choices: Sequence[ChoiceRun], avoid: Collection[Incarnation] = ()) -> RouteQuery:
        """What the router is asked for choices with the same known tokens."""
        prompt = self.prompt
        token_ids = (*prompt.prompt_token_ids, *choices[0].output_token_ids)
        members = self._pipeline.clients.fleet.of_model(prompt.card.name)
        root = root_hash(adapter=prompt.adapter, cache_salt=prompt.cache_salt)
        overlap_tokens: dict[WorkerId, int] = {}
        for block_size in members.block_sizes:
            hashes = hash_blocks(token_ids, block_size, parent=root)
            for worker_id, num_blocks in self._pipeline.prefix_index.match(hashes).items():
                worker = members.by_id.get(worker_id)
                if worker is not None and worker.layout.block_size == block_size:
                    overlap_tokens[worker_id] = num_blocks * block_size
        return RouteQuery(
            request_id=prompt.request_id,
            model=prompt.card.name,
            num_known_tokens=len(token_ids),
            num_choices=len(choices),
            overlap_tokens=overlap_tokens,
            avoid=choices[0].avoid.union(avoid),
        )

    def _slowest_hop(self) -> str:
        """The hop that the client was waiting for."""
        is_computing = any(attempt.is_waiting_for_prefill for attempt in self._attempts.values())
        return "prefill" if is_computing else "decode"


@asynccontextmanager
async def _running_beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the body and end it with the body, whose own exception leaves as it is, not in a group."""
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the group
            failure = error
        finally:
            task.cancel()
    if failure is not None:
        raise failure


def _now_s() -> float:
    return asyncio.get_running_loop().time()
