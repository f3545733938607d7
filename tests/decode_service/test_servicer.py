from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc
import pytest

from decode_service.servicer import SERVICE_NAME, DecodeServicer
from protos import convert, decode_pb2, decode_pb2_grpc
from tests.fakes.async_engine import CountingPair, counting_pair, expected_tokens
from tests.fakes.worker_pair import DECODE, GREEDY, until, within
from weir.core.errors import InvalidRequestError, RequestCancelledError, WrongIncarnationError
from weir.core.request import FinishReason, HandoffKey, SequenceRequest
from weir.runtime.grpc_client import open_channel, translate
from weir.runtime.grpc_server import GrpcServer

PROMPT = tuple(range(5, 40))
HELLO = decode_pb2.SessionUp(hello=decode_pb2.Hello(gateway_id="gateway-1", protocol_min=1, protocol_max=1))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[CountingPair, decode_pb2_grpc.DecodeStub]]:
    """A decode worker behind a real server on a free port."""
    async with counting_pair() as pair:
        add_service = partial(decode_pb2_grpc.add_DecodeServicer_to_server, DecodeServicer(pair.decode))
        async with GrpcServer("127.0.0.1", 0, add_services=[add_service], service_names=[SERVICE_NAME]) as server:
            async with open_channel(server.address) as channel:
                yield pair, decode_pb2_grpc.DecodeStub(channel)


def open_of(
    pair: CountingPair, request: SequenceRequest, key: HandoffKey, *, stream_id: int = 1, has_source: bool = True
) -> decode_pb2.SessionUp:
    message = decode_pb2.Open(
        stream_id=stream_id,
        key=convert.key_to_proto(key),
        sequence=convert.sequence_to_proto(request),
        choice_index=request.choice_index,
        incarnation=DECODE,
    )
    if has_source:
        message.source.worker_id = pair.source.worker_id
        message.source.incarnation = pair.source.incarnation
        message.source.transfer_address = pair.source.transfer_address
    return decode_pb2.SessionUp(open=message)


async def next_event(events: AsyncIterator[decode_pb2.Event]) -> decode_pb2.Event:
    return await within(anext(events))


async def events_of(call: grpc.aio.StreamStreamCall) -> AsyncIterator[decode_pb2.Event]:
    async for message in call:
        for event in message.events:
            yield event


async def test_a_sequence_travels_from_open_to_its_last_delta() -> None:
    async with served() as (pair, stub):
        call = stub.Session()
        await call.write(HELLO)
        request, key = pair.request(PROMPT)
        await call.write(open_of(pair, request, key))
        events = events_of(call)
        granted = await next_event(events)
        assert granted.WhichOneof("news") == "granted"
        await within(pair.start_prefill(request, key))
        token_ids: list[int] = []
        timings = []
        finish_reason = None
        while finish_reason is None:
            event = await next_event(events)
            delta = convert.delta_from_proto(event.delta)
            assert (event.stream_id, delta.first_index) == (1, len(token_ids))
            token_ids.extend(delta.token_ids)
            timings.append(convert.timings_from_proto(event.delta))
            finish_reason = delta.finish_reason
        assert tuple(token_ids) == expected_tokens(PROMPT, 8)
        assert finish_reason is FinishReason.LENGTH
        assert len([each for each in timings if each is not None]) == 1
        call.cancel()
        await pair.assert_at_rest()


@pytest.mark.parametrize(
    "first",
    [
        decode_pb2.SessionUp(cancel=decode_pb2.Cancel(stream_id=1)),
        decode_pb2.SessionUp(hello=decode_pb2.Hello(gateway_id="g", protocol_min=2, protocol_max=3)),
    ],
)
async def test_a_session_starts_with_a_hello_of_a_known_version(first: decode_pb2.SessionUp) -> None:
    async with served() as (_, stub):
        call = stub.Session()
        await call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(call.read())
        assert isinstance(translate(caught.value, hop="gateway"), InvalidRequestError)


async def test_a_second_hello_ends_the_session_with_an_error() -> None:
    async with served() as (_, stub):
        call = stub.Session()
        await call.write(HELLO)
        await call.write(HELLO)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(call.read())
        assert isinstance(translate(caught.value, hop="gateway"), InvalidRequestError)


async def test_an_open_that_cannot_be_is_refused_alone() -> None:
    async with served() as (pair, stub):
        call = stub.Session()
        await call.write(HELLO)
        request, key = pair.request(PROMPT)
        broken = open_of(pair, request, key, stream_id=1)
        del broken.open.sequence.prompt_token_ids[:]
        await call.write(broken)
        other_start = open_of(pair, request, key, stream_id=2)
        other_start.open.incarnation = "decode-0"
        await call.write(other_start)
        events = events_of(call)
        errors = {}
        for _ in range(2):
            event = await next_event(events)
            errors[event.stream_id] = convert.error_from_proto(event.failed)
        assert isinstance(errors[1], InvalidRequestError)
        assert isinstance(errors[2], WrongIncarnationError)
        await call.write(open_of(pair, request, key, stream_id=3, has_source=False))
        assert (await next_event(events)).stream_id == 3
        call.cancel()


@pytest.mark.parametrize("end", ["half-close", "cancel", "cancel-stream"])
async def test_whatever_ends_the_gateways_interest_frees_its_sequences(end: str) -> None:
    async with served() as (pair, stub):
        runner = pair.decode_engine.runner
        call = stub.Session()
        await call.write(HELLO)
        request, key = pair.request(PROMPT, replace(GREEDY, max_tokens=100))
        await call.write(open_of(pair, request, key))
        events = events_of(call)
        await within(pair.start_prefill(request, key))
        runner.hold()
        while (await next_event(events)).WhichOneof("news") != "delta":
            pass
        match end:
            case "half-close":
                await call.done_writing()
            case "cancel":
                call.cancel()
            case "cancel-stream":
                await call.write(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(stream_id=1)))
        await until(lambda: pair.decode.num_open == 0)
        runner.run_freely()
        await pair.assert_at_rest()
        call.cancel()


async def test_an_abort_by_id_is_counted_and_told_to_the_gateway() -> None:
    async with served() as (pair, stub):
        call = stub.Session()
        await call.write(HELLO)
        request, key = pair.request(PROMPT)
        await call.write(open_of(pair, request, key))
        events = events_of(call)
        await next_event(events)
        response = await stub.Abort(decode_pb2.AbortRequest(request_id=request.request_id))
        assert response.num_aborted == 1
        assert isinstance(convert.error_from_proto((await next_event(events)).failed), RequestCancelledError)
        assert (await stub.Abort(decode_pb2.AbortRequest(request_id="unknown"))).num_aborted == 0
        call.cancel()
        await pair.assert_at_rest()


async def test_the_prefix_cache_is_reset_while_nothing_uses_it() -> None:
    async with served() as (pair, stub):
        await pair.generate(PROMPT)
        assert await pair.decode_engine.kv_snapshot()
        assert (await stub.ResetPrefixCache(decode_pb2.ResetPrefixCacheRequest())).is_reset
        assert not await pair.decode_engine.kv_snapshot()
