"""The clients against real gRPC servers with servicers that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from gateway.decode_client import GrpcDecodeClient
from gateway.prefill_client import GrpcPrefillClient
from gateway.worker_clients import GrpcWorkerClients, probe_worker
from gateway.worker_protocols import PrefillChoice
from protos import common_pb2, convert, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.fakes.worker_clients import worker_info
from tests.fakes.worker_pair import until
from weir.core.deadline import Deadline
from weir.core.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    HandoffLostError,
    HopFailedError,
    OverloadedError,
    RequestCancelledError,
    WeirError,
    WorkerLostError,
)
from weir.core.request import (
    FinishReason,
    FirstToken,
    HandoffId,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SamplingParams,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)
from weir.core.worker import Incarnation, Role, WorkerInfo
from weir.runtime.grpc_server import GrpcServer

KEY = HandoffKey(HandoffId("h"), 2)


def sequence(**fields: object) -> SequenceRequest:
    return SequenceRequest(
        request_id=RequestId("r"),
        sequence_id="h",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=4),
        **fields,  # type: ignore[arg-type]
    )


class DecodePlayer(decode_pb2_grpc.DecodeServicer):
    """One session at a time: what came up is read from `ups`, what goes down is put into `downs`."""

    def __init__(self) -> None:
        self.ups: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()
        self.downs: asyncio.Queue[decode_pb2.SessionDown | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.metadata: dict[str, object] = {}

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> None:
        self.ended.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(request_iterator))
                while (message := await self.downs.get()) is not None:
                    await context.write(message)
                reader.cancel()
        finally:
            self.ended.set()

    async def _read(self, messages: AsyncIterator[decode_pb2.SessionUp]) -> None:
        async for message in messages:
            self.ups.put_nowait(message)

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.AbortResponse:
        return decode_pb2.AbortResponse(num_aborted=3)

    async def ResetPrefixCache(
        self, request: decode_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.ResetPrefixCacheResponse:
        return decode_pb2.ResetPrefixCacheResponse(is_reset=True)

    def say(self, *events: decode_pb2.Event) -> None:
        self.downs.put_nowait(decode_pb2.SessionDown(events=events))


class PrefillPlayer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self) -> None:
        self.requests: asyncio.Queue[prefill_pb2.PrefillRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[prefill_pb2.PrefillResponse | WeirError] = asyncio.Queue()
        self.released: asyncio.Queue[prefill_pb2.ReleaseRequest] = asyncio.Queue()
        self.rebound: list[prefill_pb2.RebindRequest] = []
        self.is_cancelled = asyncio.Event()
        self.remaining_s: float | None = None

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        self.requests.put_nowait(request)
        self.remaining_s = context.time_remaining()
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        if isinstance(answer, WeirError):
            raise answer
        return answer

    async def Release(
        self, request: prefill_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ReleaseResponse:
        self.released.put_nowait(request)
        return prefill_pb2.ReleaseResponse(num_released=len(request.keys))

    async def Rebind(
        self, request: prefill_pb2.RebindRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.RebindResponse:
        if request.decode_incarnation == "late":
            raise HandoffLostError("it has expired", hop="transfer")
        self.rebound.append(request)
        return prefill_pb2.RebindResponse()

    async def Renew(
        self, request: prefill_pb2.RenewRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.RenewResponse:
        return prefill_pb2.RenewResponse(lost=[key for key in request.keys if key.epoch == 0])

    async def Abort(
        self, request: prefill_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.AbortResponse:
        return prefill_pb2.AbortResponse(num_aborted=2)

    async def ResetPrefixCache(
        self, request: prefill_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ResetPrefixCacheResponse:
        return prefill_pb2.ResetPrefixCacheResponse(is_reset=False)


def serve(player: DecodePlayer | PrefillPlayer, *, port: int = 0) -> GrpcServer:
    def add(server: grpc.aio.Server) -> None:
        if isinstance(player, DecodePlayer):
            decode_pb2_grpc.add_DecodeServicer_to_server(player, server)
        else:
            prefill_pb2_grpc.add_PrefillServicer_to_server(player, server)

    return GrpcServer("127.0.0.1", port, add_services=(add,), grace_s=0.0)


@dataclass
class Listener:
    """Keeps what it hears, in order."""

    heard: asyncio.Queue[object] = field(default_factory=asyncio.Queue)

    def on_granted(self) -> None:
        self.heard.put_nowait("granted")

    def on_denied(self, retry_after_s: float) -> None:
        self.heard.put_nowait(retry_after_s)

    def on_delta(
        self, delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...], timings: HandoffTimings | None
    ) -> None:
        if delta.token_ids == (666,):
            raise ZeroDivisionError
        self.heard.put_nowait((delta, prompt_logprobs, timings))

    def on_failed(self, error: WeirError) -> None:
        self.heard.put_nowait(error)


@dataclass
class Changes:
    """Counts how often a client says that it has changed."""

    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> None:
        self.happened.set()

    async def wait(self) -> None:
        await self.happened.wait()
        self.happened.clear()


@asynccontextmanager
async def running(client: GrpcDecodeClient | GrpcPrefillClient) -> AsyncIterator[None]:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.run())
        yield
        task.cancel()


@asynccontextmanager
async def decode_pair() -> AsyncIterator[tuple[DecodePlayer, GrpcDecodeClient, Changes]]:
    player, changes = DecodePlayer(), Changes()
    async with serve(player) as server:
        info = worker_info("d0", Role.DECODE, control_address=server.address)
        client = GrpcDecodeClient(info, gateway_id="g", on_change=changes)
        async with running(client):
            assert (await player.ups.get()).hello == decode_pb2.Hello(gateway_id="g", protocol_min=1, protocol_max=1)
            yield player, client, changes


@asynccontextmanager
async def prefill_pair() -> AsyncIterator[tuple[PrefillPlayer, GrpcPrefillClient]]:
    player = PrefillPlayer()
    async with serve(player) as server:
        info = worker_info("p0", Role.PREFILL, control_address=server.address)
        client = GrpcPrefillClient(info, on_change=lambda: None)
        async with running(client):
            yield player, client


# Decode


async def test_an_open_says_everything_that_the_worker_needs() -> None:
    async with decode_pair() as (player, client, _):
        source = worker_info("p7", Role.PREFILL)
        client.open(sequence(choice_index=1), KEY, source=source, listener=Listener())
        opened = (await player.ups.get()).open
    assert convert.key_from_proto(opened.key) == KEY
    assert (opened.choice_index, opened.incarnation) == (1, client.info.incarnation)
    assert opened.source.transfer_address == source.transfer_address
    assert opened.source.incarnation == source.incarnation
    assert convert.sequence_from_proto(opened.sequence, sequence_id="h", choice_index=1) == sequence(choice_index=1)


async def test_one_message_holds_the_news_of_many_sequences() -> None:
    timings = HandoffTimings(transfer_s=0.25, exposed_s=0.125, first_step_s=0.5, size_bytes=8)
    last = TokenDelta(first_index=0, token_ids=(5, 6), finish_reason=FinishReason.STOP, stop_token_id=6)
    async with decode_pair() as (player, client, _):
        one, two, three = Listener(), Listener(), Listener()
        for listener in (one, two, three):
            client.open(sequence(), KEY, source=None, listener=listener)
        ids = [(await player.ups.get()).open.stream_id for _ in range(3)]
        assert len(set(ids)) == 3
        player.say(
            decode_pb2.Event(stream_id=ids[0], granted=decode_pb2.Granted()),
            decode_pb2.Event(stream_id=ids[1], denied=decode_pb2.Denied(retry_after_ms=250)),
            decode_pb2.Event(stream_id=99, granted=decode_pb2.Granted()),
            decode_pb2.Event(stream_id=ids[2], failed=convert.error_to_proto(CapacityExceededError("too long"))),
            decode_pb2.Event(stream_id=ids[0], delta=convert.delta_to_proto(last, timings=timings)),
        )
        assert await one.heard.get() == "granted"
        assert await one.heard.get() == (last, (), timings)
        assert await two.heard.get() == 0.25
        error = await three.heard.get()
        assert isinstance(error, CapacityExceededError)
        assert error.message == "too long"
        assert client.is_idle


async def test_a_cancel_is_sent_once_and_only_while_the_sequence_lives() -> None:
    async with decode_pair() as (player, client, _):
        ended, listener = Listener(), Listener()
        over = client.open(sequence(), KEY, source=None, listener=ended)
        live = client.open(sequence(), KEY, source=None, listener=listener)
        ids = [(await player.ups.get()).open.stream_id for _ in range(2)]
        player.say(decode_pb2.Event(stream_id=ids[0], denied=decode_pb2.Denied()))
        await ended.heard.get()
        over.cancel()
        live.cancel()
        live.cancel()
        assert (await player.ups.get()).cancel.stream_id == ids[1]
        player.say(decode_pb2.Event(stream_id=ids[1], granted=decode_pb2.Granted()))
        again = Listener()
        client.open(sequence(), KEY, source=None, listener=again)
        last = (await player.ups.get()).open.stream_id
        player.say(decode_pb2.Event(stream_id=last, granted=decode_pb2.Granted()))
        assert await again.heard.get() == "granted"
        assert listener.heard.empty()


async def test_the_end_of_the_session_fails_its_sequences_and_it_comes_back_by_itself() -> None:
    async with decode_pair() as (player, client, changes):
        listener = Listener()
        client.open(sequence(), KEY, source=None, listener=listener)
        await player.ups.get()
        player.downs.put_nowait(None)
        error = await listener.heard.get()
        assert isinstance(error, WorkerLostError)
        assert error.hop == "decode"
        assert not client.is_connected
        with pytest.raises(WorkerLostError):
            client.open(sequence(), KEY, source=None, listener=listener)
        while not client.is_connected:
            await changes.wait()
        assert (await player.ups.get()).HasField("hello")
        client.open(sequence(), KEY, source=None, listener=listener)
        assert (await player.ups.get()).HasField("open")


async def test_a_worker_that_is_not_there_fails_what_was_opened_on_it() -> None:
    async with serve(DecodePlayer()) as server:
        address = server.address
    changes = Changes()
    client = GrpcDecodeClient(
        worker_info("d0", Role.DECODE, control_address=address), gateway_id="g", on_change=changes
    )
    listener = Listener()
    client.open(sequence(), KEY, source=None, listener=listener)
    async with running(client):
        assert isinstance(await listener.heard.get(), WorkerLostError)
        assert not client.is_connected


async def test_a_client_that_is_closed_ends_the_session() -> None:
    async with decode_pair() as (player, client, _):
        client.open(sequence(), KEY, source=None, listener=Listener())
        await player.ups.get()
    async with asyncio.timeout(5):
        await player.ended.wait()


@pytest.mark.parametrize(
    ("delta", "hop"),
    [(decode_pb2.Delta(token_ids=[666]), "gateway"), (decode_pb2.Delta(token_ids=[1], finish_reason=77), "decode")],
)
async def test_an_event_that_makes_no_sense_ends_its_sequence_alone(delta: decode_pb2.Delta, hop: str) -> None:
    async with decode_pair() as (player, client, _):
        broken, fine = Listener(), Listener()
        for listener in (broken, fine):
            client.open(sequence(), KEY, source=None, listener=listener)
        ids = [(await player.ups.get()).open.stream_id for _ in range(2)]
        player.say(
            decode_pb2.Event(stream_id=ids[0], delta=delta),
            decode_pb2.Event(stream_id=ids[1], granted=decode_pb2.Granted()),
        )
        error = await broken.heard.get()
        assert isinstance(error, HopFailedError)
        assert error.hop == hop
        assert await fine.heard.get() == "granted"


async def test_decode_answers_control_calls() -> None:
    async with decode_pair() as (_, client, _):
        assert await client.abort(RequestId("r")) == 3
        assert await client.reset_prefix_cache() is True


# Prefill


CHOICES = (PrefillChoice(choice_index=0, key=KEY, decode_incarnation=Incarnation("d0-1")),)


async def test_a_prefill_says_everything_and_its_answer_comes_back() -> None:
    async with prefill_pair() as (player, client):
        logprobs = TokenLogprobs(token_id=2, logprob=-0.5, rank=1)
        token = FirstToken(choice_index=0, token_id=9, finish_reason=FinishReason.STOP, stop_token_id=9)
        player.answers.put_nowait(
            prefill_pb2.PrefillResponse(
                first_tokens=[convert.first_token_to_proto(token)],
                num_cached_tokens=2,
                prompt_logprobs=[convert.logprobs_to_proto(logprobs)],
                queue_us=1000,
                prefill_us=2000,
            )
        )
        result = await client.prefill(sequence(deadline=Deadline.after(30)), CHOICES)
        request = await player.requests.get()
    assert result.first_tokens == (token,)
    assert (result.num_cached_tokens, result.prompt_logprobs) == (2, (logprobs,))
    assert (result.queue_s, result.prefill_s) == (0.001, 0.002)
    assert request.incarnation == client.info.incarnation
    (choice,) = request.choices
    assert convert.key_from_proto(choice.key) == KEY
    assert choice.decode_incarnation == "d0-1"
    assert player.remaining_s is not None
    assert 20 < player.remaining_s <= 30


async def test_a_refusal_keeps_its_class_and_gets_its_hop() -> None:
    async with prefill_pair() as (player, client):
        player.answers.put_nowait(OverloadedError("full", retry_after_s=3.0))
        with pytest.raises(OverloadedError) as caught:
            await client.prefill(sequence(), CHOICES)
    assert (caught.value.hop, caught.value.retry_after_s) == ("prefill", 3.0)


async def test_a_deadline_ends_the_call() -> None:
    async with prefill_pair() as (_, client):
        with pytest.raises(DeadlineExceededError):
            await client.prefill(sequence(deadline=Deadline.after(0.05)), CHOICES)


async def test_cancelling_the_caller_ends_the_wait_and_the_call_ends_with_its_answer() -> None:
    """The worker ends it when it is released. A call that grpc.aio cancels leaks memory."""
    async with prefill_pair() as (player, client):
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(client.prefill(sequence(), CHOICES))
            await player.requests.get()
            calling.cancel()
        assert not client.is_idle
        player.answers.put_nowait(RequestCancelledError("released", hop="prefill"))
        await until(lambda: client.is_idle)
        assert not player.is_cancelled.is_set()


async def test_releases_are_sent_in_the_background_many_in_a_call() -> None:
    async with prefill_pair() as (player, client):
        keys = tuple(HandoffKey(HandoffId(f"h{i}"), 0) for i in range(3))
        client.release(keys[:2], "cancelled")
        client.release(keys[2:], "cancelled")
        assert not client.is_idle
        sent = await player.released.get()
    assert tuple(convert.key_from_proto(key) for key in sent.keys) == keys
    assert sent.reason == "cancelled"


async def test_a_release_that_cannot_be_sent_is_left_to_the_lease() -> None:
    async with serve(PrefillPlayer()) as server:
        address = server.address
    changes = Changes()
    client = GrpcPrefillClient(worker_info("p0", Role.PREFILL, control_address=address), on_change=changes)
    client.release((KEY,), "cancelled")
    client.retire()
    async with running(client):
        while not client.is_idle:
            await changes.wait()
        while client.is_connected:
            await changes.wait()


async def test_prefill_answers_control_calls() -> None:
    async with prefill_pair() as (player, client):
        await client.rebind(KEY, Incarnation("d1-1"))
        with pytest.raises(HandoffLostError):
            await client.rebind(KEY, Incarnation("late"))
        gone = HandoffKey(HandoffId("gone"), 0)
        assert await client.renew((KEY, gone)) == (gone,)
        assert await client.abort(RequestId("r")) == 2
        assert await client.reset_prefix_cache() is False
    assert [rebind.decode_incarnation for rebind in player.rebound] == ["d1-1"]
    assert player.rebound[0].key == common_pb2.HandoffKey(handoff_id="h", epoch=2)


# All of them


class FakeDirectory:
    def __init__(self, *workers: WorkerInfo) -> None:
        self._workers = workers
        self.revision = 0
        self._changed = asyncio.Event()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers

    def become(self, *workers: WorkerInfo) -> None:
        self._workers = workers
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, seen_revision: int | None = None) -> int:
        while self.revision == seen_revision:
            await self._changed.wait()
        return self.revision


def incarnations(clients: GrpcWorkerClients) -> set[str]:
    return {worker.incarnation for worker in clients.fleet.workers}


async def until_clients_are(clients: GrpcWorkerClients, expected: set[str]) -> None:
    async with asyncio.timeout(10):
        while incarnations(clients) != expected:
            await clients.wait_for_change()


async def test_the_fleet_is_who_is_registered_and_connected() -> None:
    decode, prefill = DecodePlayer(), PrefillPlayer()
    async with serve(prefill) as prefill_server:
        async with serve(decode) as decode_server:
            d0 = worker_info("d0", Role.DECODE, control_address=decode_server.address)
            p0 = worker_info("p0", Role.PREFILL, control_address=prefill_server.address)
            directory = FakeDirectory(d0)
            async with GrpcWorkerClients(directory, gateway_id="g") as clients:
                await until_clients_are(clients, {"d0-1"})
                directory.become(d0, p0)
                await until_clients_are(clients, {"d0-1", "p0-1"})
                assert await clients.get_prefill(p0).abort(RequestId("r")) == 2
                decode.downs.put_nowait(None)
                await until_clients_are(clients, {"p0-1"})
                await until_clients_are(clients, {"d0-1", "p0-1"})
                directory.become(d0)
                await clients.wait_for_change()
                assert incarnations(clients) == {"d0-1"}
                with pytest.raises(WorkerLostError):
                    clients.get_prefill(p0)


async def test_a_worker_that_leaves_may_finish_what_is_open_on_it() -> None:
    player = DecodePlayer()
    async with serve(player) as server:
        d0 = worker_info("d0", Role.DECODE, control_address=server.address)
        directory = FakeDirectory(d0)
        async with asyncio.timeout(10), GrpcWorkerClients(directory, gateway_id="g") as clients:
            await until_clients_are(clients, {"d0-1"})
            listener = Listener()
            clients.get_decode(d0).open(sequence(), KEY, source=None, listener=listener)
            assert (await player.ups.get()).HasField("hello")
            stream_id = (await player.ups.get()).open.stream_id
            directory.become()
            await until_clients_are(clients, set())
            last = TokenDelta(first_index=0, token_ids=(1,), finish_reason=FinishReason.LENGTH)
            player.say(decode_pb2.Event(stream_id=stream_id, delta=convert.delta_to_proto(last)))
            assert await listener.heard.get() == (last, (), None)
            await player.ended.wait()


async def test_a_restarted_worker_gets_a_client_of_its_own() -> None:
    player = PrefillPlayer()
    async with serve(player) as server:
        first = worker_info("p0", Role.PREFILL, control_address=server.address)
        second = worker_info("p0", Role.PREFILL, control_address=server.address, incarnation="p0-2")
        directory = FakeDirectory(first)
        async with GrpcWorkerClients(directory, gateway_id="g") as clients:
            await until_clients_are(clients, {"p0-1"})
            directory.become(second)
            await until_clients_are(clients, {"p0-2"})
            assert clients.get_prefill(second).info == second


async def test_a_probe_finds_who_answers() -> None:
    async with serve(PrefillPlayer()) as server:
        worker = worker_info("p0", Role.PREFILL, control_address=server.address)
        assert await probe_worker(worker)
    assert not await probe_worker(worker)
