"""The gRPC face of a decode worker: converts, calls one method, converts back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from decode_service.events import Denied, Failed, Granted, HandoffSource, OpenSequence, SessionEvent
from decode_service.session import Session
from decode_service.worker import DecodeWorker
from protos import convert, decode_pb2, decode_pb2_grpc
from weir.core.errors import InvalidRequestError, WeirError
from weir.core.request import RequestId
from weir.core.worker import PROTOCOL_MAX, PROTOCOL_MIN, Incarnation, WorkerId, speaks_our_protocol

SERVICE_NAME = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """`weir.decode.v1.Decode`; errors leave through the server's interceptor."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.SessionUp], context: grpc.aio.ServicerContext
    ) -> None:
        hello = await _read_hello(request_iterator)
        async with self._worker.session(hello.gateway_id) as session, asyncio.TaskGroup() as group:
            receiver = group.create_task(_receive(request_iterator, session))
            while events := await session.read():
                await context.write(decode_pb2.SessionDown(events=[_event_to_proto(event) for event in events]))
            receiver.cancel()

    async def Abort(
        self, request: decode_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.AbortResponse:
        return decode_pb2.AbortResponse(num_aborted=self._worker.abort(RequestId(request.request_id)))

    async def ResetPrefixCache(
        self, request: decode_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.ResetPrefixCacheResponse:
        return decode_pb2.ResetPrefixCacheResponse(is_reset=await self._worker.reset_prefix_cache())


async def _read_hello(messages: AsyncIterator[decode_pb2.SessionUp]) -> decode_pb2.Hello:
    first = await anext(aiter(messages), decode_pb2.SessionUp())
    if first.WhichOneof("message") != "hello":
        raise InvalidRequestError("a session starts with hello", param="hello", hop="decode")
    hello = first.hello
    if not speaks_our_protocol(hello.protocol_min, hello.protocol_max):
        raise InvalidRequestError(
            f"the gateway speaks versions {hello.protocol_min} to {hello.protocol_max}, "
            f"this worker {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            param="protocol",
            hop="decode",
        )
    return hello


async def _receive(messages: AsyncIterator[decode_pb2.SessionUp], session: Session) -> None:
    """Until the gateway ends its side: that ends the session."""
    async for message in messages:
        match message.WhichOneof("message"):
            case "open":
                _open(message.open, session)
            case "cancel":
                session.cancel(message.cancel.stream_id)
            case "hello":
                raise InvalidRequestError("a session has one hello", param="hello", hop="decode")
            case None:
                pass  # of a later version
    session.close()


def _open(message: decode_pb2.Open, session: Session) -> None:
    try:
        opened = _open_from_proto(message)
    except WeirError as error:
        session.refuse(message.stream_id, error)
    else:
        session.open(opened)


def _open_from_proto(message: decode_pb2.Open) -> OpenSequence:
    key = convert.key_from_proto(message.key)
    source = message.source
    return OpenSequence(
        stream_id=message.stream_id,
        key=key,
        request=convert.sequence_from_proto(
            message.sequence, sequence_id=f"{key.handoff_id}/{key.epoch}", choice_index=message.choice_index
        ),
        source=(
            HandoffSource(
                worker_id=WorkerId(source.worker_id),
                incarnation=Incarnation(source.incarnation),
                transfer_address=source.transfer_address,
            )
            if message.HasField("source")
            else None
        ),
        incarnation=Incarnation(message.incarnation),
        trace_context=dict(message.trace_context),
    )


def _event_to_proto(event: SessionEvent) -> decode_pb2.Event:
    match event:
        case Granted():
            granted = decode_pb2.Granted(
                num_cached_tokens=event.num_cached_tokens, num_claimed_blocks=event.num_claimed_blocks
            )
            return decode_pb2.Event(stream_id=event.stream_id, granted=granted)
        case Denied():
            denied = decode_pb2.Denied(retry_after_ms=round(event.retry_after_s * 1000))
            return decode_pb2.Event(stream_id=event.stream_id, denied=denied)
        case Failed():
            return decode_pb2.Event(stream_id=event.stream_id, failed=convert.error_to_proto(event.error))
        case _:
            delta = convert.delta_to_proto(event.delta, prompt_logprobs=event.prompt_logprobs, timings=event.timings)
            return decode_pb2.Event(stream_id=event.stream_id, delta=delta)
