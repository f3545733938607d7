"""The laws of a prompt's way through prefill and decode, with workers that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import RequestMetrics
from gateway.pipeline import GenerationPipeline, GenerationStream, PipelineSettings, PromptRequest
from gateway.router import Router, RouterSettings
from tests.fakes.decode_client import FakeDecodeClient
from tests.fakes.prefill_client import FakePrefillClient
from tests.fakes.worker_clients import MODEL, FakeWorkerClients, model_card, worker_info
from weir.cluster.request_journal import RequestRecord, RequestState
from weir.core.block_hash import BlockHash
from weir.core.deadline import Deadline
from weir.core.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    HandoffLostError,
    HopFailedError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    TransferProtocolError,
    UnavailableError,
    WeirError,
    WorkerLostError,
)
from weir.core.request import (
    FinishReason,
    FirstToken,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from weir.core.worker import Role, WorkerId

PROMPT = tuple(range(100, 132))
FAST = PipelineSettings(header_wait_s=30.0, redispatch_wait_s=30.0, renew_interval_s=0.001)


@dataclass
class FakeIndex:
    overlaps: dict[WorkerId, int] = field(default_factory=dict)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        return {worker: min(len(hashes), num_blocks) for worker, num_blocks in self.overlaps.items()}


@dataclass
class FakeJournal:
    records: list[RequestRecord] = field(default_factory=list)

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)

    @property
    def states(self) -> list[tuple[int, RequestState]]:
        return [(record.epoch, record.state) for record in self.records]


class House:
    """A pipeline over fake workers; one prefill and one decode worker if nothing else is said."""

    def __init__(
        self,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        settings: PipelineSettings = FAST,
        routing: RouterSettings | None = None,
        is_redis_up: bool = True,
    ) -> None:
        self.prefill = [FakePrefillClient(worker_info(f"p{i}", Role.PREFILL)) for i in range(num_prefill)]
        self.decode = [FakeDecodeClient(worker_info(f"d{i}", Role.DECODE)) for i in range(num_decode)]
        self.clients = FakeWorkerClients(prefill=self.prefill, decode=self.decode)
        self.index = FakeIndex()
        self.journal = FakeJournal()
        self.registry = CollectorRegistry()
        self.pipeline = GenerationPipeline(
            gateway_id="g",
            clients=self.clients,
            router=Router(routing or RouterSettings(local_prefill_max_tokens=4)),
            prefix_index=self.index,
            journal=self.journal,
            metrics=RequestMetrics(self.registry, max_model_len=1024),
            is_redis_up=lambda: is_redis_up,
            settings=settings,
        )

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def is_idle(self) -> bool:
        return self.pipeline.num_running == 0 and len(self.pipeline.in_flight) == 0


@pytest.fixture
def house() -> House:
    return House()


def prompt(n: int = 1, **changes: object) -> PromptRequest:
    base = PromptRequest(
        request_id=RequestId("r1"),
        card=model_card(),
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(seed=1, max_tokens=8),
        n=n,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@dataclass
class Client:
    """Reads one prompt to its end, as an HTTP handler does."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    stream: GenerationStream | None = None
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    progress: asyncio.Condition = field(default_factory=asyncio.Condition)
    error: WeirError | None = None

    async def run(self, house: House, request: PromptRequest) -> None:
        try:
            async with house.pipeline.generate(request) as stream:
                self.stream = stream
                self.entered.set()
                while news := await stream.read():
                    async with self.progress:
                        for each in news:
                            seen = self.tokens.setdefault(each.choice_index, [])
                            assert each.delta.first_index == len(seen), "a token was repeated or lost"
                            seen.extend(each.delta.token_ids)
                            self.cached.add(each.delta.num_cached_tokens)
                            if each.prompt_logprobs:
                                self.prompt_logprobs.append(each.prompt_logprobs)
                            if each.delta.finish_reason is not None:
                                self.reasons[each.choice_index] = each.delta.finish_reason
                        self.progress.notify_all()
        except WeirError as error:
            self.error = error

    async def has_tokens(self, number: int, choice: int = 0) -> None:
        async with self.progress:
            await self.progress.wait_for(lambda: len(self.tokens.get(choice, ())) >= number)


@asynccontextmanager
async def running(house: House, request: PromptRequest) -> AsyncIterator[tuple[Client, asyncio.Task[None]]]:
    """A client at work beside the test; it must have ended by itself, or been cancelled, when the test is done."""
    client = Client()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        yield client, tasks.create_task(client.run(house, request))
    assert house.is_idle


def first(token_id: int, choice_index: int = 0, finish: FinishReason | None = None) -> FirstToken:
    return FirstToken(choice_index=choice_index, token_id=token_id, finish_reason=finish)


async def _raises(kind: type[Exception], work: Awaitable[None]) -> None:
    with pytest.raises(kind):
        await work


# Order of events


async def test_open_and_prefill_are_sent_at_the_same_time(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        call = await house.prefill[0].called(0)
        assert not client.entered.is_set()
        assert sequence.source == house.prefill[0].info
        assert sequence.request.prompt_token_ids == call.request.prompt_token_ids == PROMPT
        (choice,) = call.choices
        assert choice.key == sequence.key == HandoffKey(sequence.key.handoff_id, 0)
        assert choice.decode_incarnation == house.decode[0].info.incarnation
        assert sequence.key.handoff_id != "r1"
        sequence.grant()
        call.first_token(7)
        await client.has_tokens(1)
        sequence.tokens(0, 7, 8, finish=FinishReason.LENGTH)
    assert client.tokens == {0: [7, 8]}
    assert client.reasons == {0: FinishReason.LENGTH}
    assert house.prefill[0].released == []


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
async def test_the_order_of_grant_first_token_and_decode_does_not_matter(house: House, order: tuple[int, ...]) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        call = await house.prefill[0].called(0)
        moves: list[Callable[[], None]] = [
            sequence.grant,
            lambda: call.first_token(7, num_cached_tokens=3),
            lambda: sequence.tokens(0, 7, 8, num_cached_tokens=3),
        ]
        for which in order:
            moves[which]()
            await asyncio.sleep(0)
        sequence.tokens(2, 9, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8, 9]}
    assert client.cached == {3}


async def test_the_first_token_reaches_the_client_before_decode_has_anything(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        (await house.prefill[0].called(0)).first_token(7)
        await client.has_tokens(1)
        sequence.tokens(0, 7)
        sequence.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


async def test_a_first_token_that_only_decode_tells_is_enough(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.tokens(0, 7, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}
    assert house.prefill[0].calls[0].is_cancelled


async def test_a_first_token_that_finishes_frees_both_sides(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        (await house.prefill[0].called(0)).first_tokens(first(2, finish=FinishReason.STOP))
    assert client.tokens == {0: [2]}
    assert client.reasons == {0: FinishReason.STOP}
    assert sequence.is_cancelled


async def test_a_first_token_that_finishes_needs_no_grant(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).first_tokens(first(2, finish=FinishReason.LENGTH))
    assert client.entered.is_set()
    assert sequence.is_cancelled


async def test_n_choices_share_one_prefill(house: House) -> None:
    async with running(house, prompt(n=3)) as (client, _):
        sequences = [await house.decode[0].opened(i) for i in range(3)]
        call = await house.prefill[0].called(0)
        assert {choice.key for choice in call.choices} == {sequence.key for sequence in sequences}
        assert len({sequence.key.handoff_id for sequence in sequences}) == 3
        assert [sequence.request.choice_index for sequence in sequences] == [0, 1, 2]
        for sequence in sequences[:2]:
            sequence.grant()
        await asyncio.sleep(0)
        assert not client.entered.is_set()
        sequences[2].grant()
        call.first_tokens(first(12, 2), first(10, 0), first(11, 1, FinishReason.STOP))
        sequences[2].tokens(0, 12, 22, finish=FinishReason.LENGTH)
        sequences[0].tokens(0, 10, 20, finish=FinishReason.STOP)
    assert client.tokens == {0: [10, 20], 1: [11], 2: [12, 22]}
    assert len(house.prefill[0].calls) == 1
    assert house.sample("vllm:request_params_n_sum", model_name=MODEL, engine="0") == 3


async def test_a_covered_prompt_goes_to_decode_alone(house: House) -> None:
    house.index.overlaps = {WorkerId("d0"): 7}
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        assert sequence.source is None
        sequence.grant()
        sequence.tokens(0, 7, finish=FinishReason.STOP, num_cached_tokens=28)
    assert client.tokens == {0: [7]}
    assert house.prefill[0].calls == []
    assert house.sample("weir_route_decisions_total", policy="prefix_and_load", choice="local_covered") == 1


async def test_prompt_logprobs_are_told_once_by_whoever_comes_first(house: House) -> None:
    told = (TokenLogprobs(token_id=101, logprob=-1.0, rank=1),)
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.tokens(0, 7)
        (await house.prefill[0].called(0)).first_tokens(first(7), prompt_logprobs=told)
        await asyncio.sleep(0)
        sequence.tokens(1, 8, finish=FinishReason.STOP, prompt_logprobs=told)
    assert client.prompt_logprobs == [told]


# The header


async def test_a_refusal_before_the_grant_is_raised_on_entry(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.fail(CapacityExceededError("can never fit", param="max_tokens"))
    assert not client.entered.is_set()
    assert isinstance(client.error, CapacityExceededError)
    assert client.error.hop == "decode"
    assert len(house.prefill[0].released) == 1
    assert house.sample("vllm:request_success_total", model_name=MODEL, engine="0", finished_reason="error") == 1


async def test_the_header_leaves_without_a_grant_when_its_time_is_over() -> None:
    house = House(settings=replace(FAST, header_wait_s=0.01))
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        await client.entered.wait()
        sequence.fail(CapacityExceededError("can never fit"))
    assert isinstance(client.error, CapacityExceededError)


async def test_no_decode_worker_is_refused_at_once() -> None:
    house = House(num_decode=0)
    with pytest.raises(NoWorkerError) as caught:
        async with house.pipeline.generate(prompt()):
            pytest.fail("entered")
    assert caught.value.hop == "decode"
    assert house.is_idle


async def test_an_exception_of_the_body_leaves_as_it_is_and_frees_both_sides(house: House) -> None:
    async def fail_inside() -> None:
        async with house.pipeline.generate(prompt()):
            raise ZeroDivisionError

    async with asyncio.TaskGroup() as tasks:
        body = tasks.create_task(_raises(ZeroDivisionError, fail_inside()))
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        await body
    assert sequence.is_cancelled
    assert house.prefill[0].released == [sequence.key]
    assert house.is_idle


# Denial


async def test_a_denial_moves_to_another_decode_worker_and_rebinds_the_hold() -> None:
    house = House(num_decode=2)
    async with running(house, prompt()) as (client, _):
        denied = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).first_token(7)
        denied.deny(retry_after_s=60.0)
        sequence = await house.decode[1].opened(0)
        assert sequence.key == denied.key
        assert house.prefill[0].rebound == [(denied.key, house.decode[1].info.incarnation)]
        sequence.grant()
        sequence.tokens(0, 7, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}
    assert len(house.prefill[0].calls) == 1
    assert house.sample("weir_redispatches_total", hop="decode") == 0


async def test_the_only_decode_worker_is_asked_again_when_its_time_has_come(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        for number in range(3):
            (await house.decode[0].opened(number)).deny(retry_after_s=0.001)
        sequence = await house.decode[0].opened(3)
        assert house.prefill[0].rebound == []
        sequence.grant()
        sequence.tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {0: [7]}


async def test_holds_are_renewed_until_a_decode_worker_has_the_kv(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        (await house.decode[0].opened(0)).deny(retry_after_s=0.05)
        (await house.prefill[0].called(0)).first_token(7)
        await house.prefill[0].renewals()
        sequence = await house.decode[0].opened(1)
        assert house.prefill[0].renewed[0] == sequence.key
        sequence.grant()
        house.prefill[0].lost.add(sequence.key)  # fetched in this moment: no reason to start again
        await house.prefill[0].renewals()
        sequence.tokens(0, 7)
        num_renewed = len(house.prefill[0].renewed)
        await asyncio.sleep(0.005)
        assert len(house.prefill[0].renewed) == num_renewed
        sequence.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


async def test_a_hold_that_is_lost_before_a_grant_starts_again(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        denied = await house.decode[0].opened(0)
        house.prefill[0].lost.add(denied.key)
        (await house.prefill[0].called(0)).first_token(7)
        denied.deny(retry_after_s=60.0)
        again = await house.decode[0].opened(1)
        assert again.key == HandoffKey(denied.key.handoff_id, 1)
        assert again.request.resumed_output_token_ids == (7,)
        again.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


async def test_a_rebind_of_a_lost_hold_starts_again() -> None:
    house = House(num_decode=2)
    house.prefill[0].rebind_error = HandoffLostError("expired", hop="transfer")
    async with running(house, prompt()) as (client, _):
        denied = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).first_token(7)
        await house.prefill[0].calls[0].ended.wait()
        denied.deny(retry_after_s=60.0)
        again = await house.decode[0].opened(1)
        assert again.key.epoch == 1
        again.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


# Failures


async def test_decode_dies_in_mid_stream_and_another_goes_on_from_what_was_sent() -> None:
    house = House(num_decode=2)
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        (await house.prefill[0].called(0)).first_token(7, num_cached_tokens=3)
        sequence.tokens(0, 7, 8, 9, num_cached_tokens=3)
        await client.has_tokens(3)
        house.decode[0].die()
        again = await house.decode[1].opened(0)
        call = await house.prefill[0].called(1)
        assert again.key == HandoffKey(sequence.key.handoff_id, 1)
        assert again.request.prompt_token_ids == call.request.prompt_token_ids == PROMPT
        assert again.request.resumed_output_token_ids == call.request.resumed_output_token_ids == (7, 8, 9)
        call.first_token(10, num_cached_tokens=32)
        again.tokens(3, 10, 11, finish=FinishReason.LENGTH)
        sequence.tokens(3, 66, 67)  # a ghost of the first epoch
    assert client.tokens == {0: [7, 8, 9, 10, 11]}
    assert client.cached == {3}
    assert house.sample("weir_redispatches_total", hop="decode") == 1
    assert house.journal.states[-1] == (1, RequestState.DONE)


async def test_tokens_that_the_client_has_not_read_are_resumed_too() -> None:
    house = House(num_decode=2)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        entered, go_on = asyncio.Event(), asyncio.Event()
        tokens: list[int] = []

        async def read_late() -> None:
            async with house.pipeline.generate(prompt()) as stream:
                entered.set()
                await go_on.wait()
                while news := await stream.read():
                    tokens.extend(news[0].delta.token_ids)

        tasks.create_task(read_late())
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        await entered.wait()
        sequence.tokens(0, 7)
        sequence.tokens(1, 8)
        house.decode[0].die()
        again = await house.decode[1].opened(0)
        assert again.request.resumed_output_token_ids == (7, 8)
        again.tokens(2, 9, finish=FinishReason.STOP)
        go_on.set()
    assert tokens == [7, 8, 9]


async def test_prefill_dies_before_its_answer_and_decode_computes_the_prompt(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        (await house.prefill[0].called(0)).fail(WorkerLostError("connection reset", hop="prefill"))
        again = await house.decode[0].opened(1)
        assert sequence.is_cancelled
        assert again.source is None
        assert again.key.epoch == 1
        again.tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {0: [7]}
    assert house.prefill[0].released == [sequence.key]
    assert house.sample("weir_redispatches_total", hop="prefill") == 1
    assert house.sample("weir_route_decisions_total", policy="prefix_and_load", choice="local_no_prefill") == 1


async def test_prefill_dies_and_another_takes_over() -> None:
    house = House(num_prefill=2)
    async with running(house, prompt()) as (client, _):
        await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).fail(WorkerLostError("connection reset", hop="prefill"))
        call = await house.prefill[1].called(0)
        again = await house.decode[0].opened(1)
        assert again.source == house.prefill[1].info
        call.first_token(7)
        again.tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {0: [7]}


async def test_a_failure_of_prefill_after_decode_has_the_kv_is_of_no_matter(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        call = await house.prefill[0].called(0)
        sequence.tokens(0, 7)
        call.fail(WorkerLostError("connection reset", hop="prefill"))
        await call.ended.wait()
        sequence.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}
    assert len(house.decode[0].sequences) == 1


async def test_a_lost_handoff_is_computed_again_elsewhere(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).first_token(7)
        await client.has_tokens(0)
        sequence.fail(HandoffLostError("expired", hop="transfer"))
        again = await house.decode[0].opened(1)
        assert again.source is None
        again.tokens(len(again.request.resumed_output_token_ids), 8, finish=FinishReason.STOP)
    assert client.tokens[0][-1] == 8
    assert house.sample("weir_redispatches_total", hop="transfer") == 1


async def test_both_die_and_the_stream_waits_for_new_ones(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.tokens(0, 7)
        house.clients.prefill.clear()
        house.decode[0].die()
        await house.clients.somebody_waits()
        newcomer = FakeDecodeClient(worker_info("d9", Role.DECODE))
        house.clients.decode.append(newcomer)
        house.clients.announce_change()
        again = await newcomer.opened(0)
        assert again.source is None
        assert again.request.resumed_output_token_ids == (7,)
        again.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


async def test_a_stream_without_a_worker_ends_with_an_error_that_names_the_hop() -> None:
    house = House(settings=replace(FAST, redispatch_wait_s=0.01))
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.tokens(0, 7)
        house.decode[0].die()
    assert client.tokens == {0: [7]}
    assert isinstance(client.error, NoWorkerError)
    assert client.error.hop == "decode"
    assert house.journal.records[-1].state is RequestState.FAILED
    failure = house.journal.records[-1].failure
    assert failure is not None
    assert failure.hop == "decode"


async def test_attempts_are_bounded() -> None:
    house = House(settings=replace(FAST, max_dispatches=2))
    async with running(house, prompt()) as (client, _):
        for number in range(2):
            (await house.decode[0].opened(number)).fail(HopFailedError("broken", hop="decode"))
    assert isinstance(client.error, HopFailedError)
    assert len(house.decode[0].sequences) == 2


async def test_one_choice_fails_over_without_the_others() -> None:
    house = House(num_decode=2)
    async with running(house, prompt(n=2)) as (client, _):
        sequences = [await house.decode[0].opened(i) for i in range(2)]
        (await house.prefill[0].called(0)).first_token(7)
        for sequence in sequences:
            sequence.tokens(0, 7)
        sequences[1].fail(HopFailedError("this one alone", hop="decode"))
        again = await house.decode[1].opened(0)
        call = await house.prefill[0].called(1)
        assert [choice.choice_index for choice in call.choices] == [1]
        assert again.request.choice_index == 1
        sequences[0].tokens(1, 8, finish=FinishReason.STOP)
        again.tokens(1, 9, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8], 1: [7, 9]}


async def test_an_error_of_the_input_is_not_tried_again(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).fail(InvalidRequestError("no"))
    assert isinstance(client.error, InvalidRequestError)
    assert sequence.is_cancelled
    assert len(house.decode[0].sequences) == 1


async def test_tokens_that_leave_some_out_are_never_sent(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.tokens(0, 7)
        sequence.tokens(2, 9)
        again = await house.decode[0].opened(1)
        again.tokens(1, 8, finish=FinishReason.STOP)
    assert client.tokens == {0: [7, 8]}


async def test_a_repeat_that_differs_from_what_was_sent_is_a_failure() -> None:
    house = House(settings=replace(FAST, max_dispatches=1))
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).first_token(7)
        await house.prefill[0].calls[0].ended.wait()
        await asyncio.sleep(0)
        sequence.tokens(0, 6, 8)
    assert isinstance(client.error, TransferProtocolError)
    assert client.tokens.get(0, [7]) == [7]


# Ends that the client makes


async def _cancel_when(house: House, move: Callable[[House], Awaitable[None]]) -> None:
    async with running(house, prompt()) as (_, task):
        await move(house)
        await asyncio.sleep(0)
        task.cancel()


async def _opened(house: House) -> None:
    await house.decode[0].opened(0)
    await house.prefill[0].called(0)


async def _granted(house: House) -> None:
    await _opened(house)
    house.decode[0].sequences[0].grant()


async def _denied(house: House) -> None:
    await _opened(house)
    house.decode[0].sequences[0].deny(retry_after_s=60.0)


async def _sealed(house: House) -> None:
    await _granted(house)
    house.prefill[0].calls[0].first_token(7)
    await house.prefill[0].calls[0].ended.wait()


async def _decoding(house: House) -> None:
    await _sealed(house)
    house.decode[0].sequences[0].tokens(0, 7, 8)


@pytest.mark.parametrize("stage", [_opened, _granted, _sealed], ids=lambda stage: stage.__name__)
async def test_leaving_before_decode_has_the_kv_frees_both_sides(
    house: House, stage: Callable[[House], Awaitable[None]]
) -> None:
    await _cancel_when(house, stage)
    (sequence,) = house.decode[0].sequences
    assert sequence.is_cancelled
    assert house.prefill[0].released == [sequence.key]
    assert house.prefill[0].calls[0].ended.is_set()
    assert house.journal.records[-1].state is RequestState.CANCELLED
    assert house.sample("vllm:request_success_total", model_name=MODEL, engine="0", finished_reason="abort") == 1


async def test_leaving_a_denied_choice_releases_the_hold(house: House) -> None:
    await _cancel_when(house, _denied)
    assert house.prefill[0].released == [house.decode[0].sequences[0].key]
    assert house.prefill[0].calls[0].is_cancelled


async def test_leaving_while_decoding_cancels_decode_alone(house: House) -> None:
    await _cancel_when(house, _decoding)
    assert house.decode[0].sequences[0].is_cancelled
    assert house.prefill[0].released == []


async def test_leaving_before_anything_was_sent_leaves_nothing(house: House) -> None:
    async with running(house, prompt()) as (_, task):
        task.cancel()
    assert all(sequence.is_cancelled for sequence in house.decode[0].sequences)


async def test_leaving_while_the_stream_waits_for_a_worker_leaves_nothing(house: House) -> None:
    async with running(house, prompt()) as (client, task):
        (await house.decode[0].opened(0)).tokens(0, 7)
        house.decode[0].die()
        await house.clients.somebody_waits()
        task.cancel()
    assert client.tokens == {0: [7]}


async def test_finishing_a_choice_cancels_it_alone(house: House) -> None:
    async with running(house, prompt(n=2)) as (client, _):
        sequences = [await house.decode[0].opened(i) for i in range(2)]
        for sequence in sequences:
            sequence.grant()
        await client.entered.wait()
        assert client.stream is not None
        client.stream.finish_choice(0)
        assert sequences[0].is_cancelled
        assert not sequences[1].is_cancelled
        assert house.prefill[0].released == [sequences[0].key]
        assert not house.prefill[0].calls[0].is_cancelled
        sequences[0].tokens(0, 66)
        sequences[1].tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {1: [7]}
    assert house.journal.records[-1].state is RequestState.DONE


async def test_finishing_every_choice_ends_the_stream(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        await client.entered.wait()
        sequence.tokens(0, 7, 8)
        await client.has_tokens(2)
        assert client.stream is not None
        client.stream.finish_choice(0)
    assert sequence.is_cancelled
    assert client.error is None


async def test_a_deadline_ends_the_prompt_and_names_the_hop(house: House) -> None:
    async with running(house, prompt(deadline=Deadline.after(0.05))) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
    assert isinstance(client.error, DeadlineExceededError)
    assert client.error.hop == "prefill"
    assert sequence.is_cancelled
    assert house.prefill[0].released == [sequence.key]


async def test_a_client_that_stops_reading_is_dropped() -> None:
    house = House(settings=replace(FAST, max_buffered_tokens=4))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        entered, go_on = asyncio.Event(), asyncio.Event()

        async def stall() -> None:
            async with house.pipeline.generate(prompt()) as stream:
                entered.set()
                await go_on.wait()
                await stream.read()
                await stream.read()

        stalled = tasks.create_task(_raises(RequestCancelledError, stall()))
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        await entered.wait()
        for index in range(6):
            sequence.tokens(index, 50 + index)
        await sequence.cancelled.wait()
        go_on.set()
        await stalled
    assert house.is_idle


# Ends that others make


@pytest.mark.parametrize("name", ["r1", "mine"])
async def test_abort_by_id_or_label_ends_the_prompt_and_frees_both_sides(house: House, name: str) -> None:
    async with running(house, prompt(label="mine")) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        await client.entered.wait()
        assert house.pipeline.abort("another") == 0
        assert house.pipeline.abort(name) == 1
        assert sequence.is_cancelled
    assert isinstance(client.error, RequestCancelledError)
    assert house.prefill[0].released == [sequence.key]


async def test_fail_all_ends_every_prompt_with_the_given_error(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        await house.decode[0].opened(0)
        assert house.pipeline.fail_all(UnavailableError("the gateway stops", hop="gateway")) == 1
    assert isinstance(client.error, UnavailableError)


# Redis away


async def test_redis_away_degrades_to_what_is_known() -> None:
    house = House(is_redis_up=False)
    async with running(house, prompt()) as (client, _):
        (await house.decode[0].opened(0)).tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {0: [7]}


async def test_redis_away_refuses_new_requests_where_it_is_needed() -> None:
    house = House(is_redis_up=False, settings=replace(FAST, needs_redis=True))
    with pytest.raises(UnavailableError) as caught:
        async with house.pipeline.generate(prompt()):
            pytest.fail("entered")
    assert caught.value.retry_after_s
    assert house.sample("vllm:admission_rejections_total", model_name=MODEL, engine="0", reason="redis_away") == 1


# What is told


async def test_the_journal_gets_every_state_and_the_end_with_its_figures(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        sequence = await house.decode[0].opened(0)
        sequence.grant()
        (await house.prefill[0].called(0)).first_token(7, num_cached_tokens=16)
        await client.has_tokens(1)
        timings = HandoffTimings(transfer_s=0.5, exposed_s=0.1, first_step_s=0.2, size_bytes=10)
        sequence.tokens(0, 7, 8, num_cached_tokens=16, timings=timings)
        sequence.tokens(2, 9, finish=FinishReason.LENGTH)
    assert [state for _, state in house.journal.states] == [
        RequestState.QUEUED,
        RequestState.PREFILLING,
        RequestState.SEALED,
        RequestState.DECODING,
        RequestState.DONE,
    ]
    last = house.journal.records[-1]
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_cached_tokens) == (32, 3, 16)
    assert last.finish_reasons == (FinishReason.LENGTH,)
    assert (last.prefill_worker, last.decode_worker) == ("p0", "d0")
    assert last.timings.transfer_s == 0.5
    assert last.timings.total_s is not None
    assert house.sample("weir_ttft_seconds_sum", hop="transfer") == pytest.approx(0.1)
    assert house.sample("weir_ttft_seconds_sum", hop="first_decode_step") == pytest.approx(0.2)
    assert house.sample("weir_ttft_seconds_sum", hop="prefill") == pytest.approx(0.02)
    labels = {"model_name": MODEL, "engine": "0"}
    assert house.sample("vllm:request_generation_tokens_sum", **labels) == 3
    assert house.sample("vllm:time_to_first_token_seconds_count", **labels) == 1
    assert house.sample("vllm:inter_token_latency_seconds_count", **labels) == 2


async def test_what_is_in_flight_spreads_a_burst() -> None:
    house = House(num_decode=2, num_prefill=2)
    async with running(house, prompt()), running(house, prompt(request_id=RequestId("r2"))):
        one = await house.decode[0].opened(0)
        two = await house.decode[1].opened(0)
        assert [await house.prefill[i].called(0) for i in range(2)]
        one.tokens(0, 7, finish=FinishReason.STOP)
        two.tokens(0, 7, finish=FinishReason.STOP)


async def test_overload_of_prefill_is_relieved_by_decode(house: House) -> None:
    async with running(house, prompt()) as (client, _):
        await house.decode[0].opened(0)
        (await house.prefill[0].called(0)).fail(OverloadedError("full", hop="prefill", retry_after_s=1.0))
        again = await house.decode[0].opened(1)
        assert again.source is None
        again.tokens(0, 7, finish=FinishReason.STOP)
    assert client.tokens == {0: [7]}
