"""The session with one incarnation of a decode worker: one stream for all sequences of this gateway.

One reader takes each message apart and tells the listeners; what they do with it is theirs to bound. The stream's end
fails every sequence on it; the client then connects again by itself, with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count

import grpc

from gateway.worker_protocols import DecodeListener
from protos import convert, decode_pb2, decode_pb2_grpc
from weir.core.errors import HopFailedError, WeirError, WorkerLostError
from weir.core.request import HandoffKey, RequestId, SequenceRequest
from weir.core.worker import PROTOCOL_MAX, PROTOCOL_MIN, WorkerInfo
from weir.runtime.grpc_client import call_metadata, open_channel, translate
from weir.runtime.tracing import inject

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
"""Longest wait for the answer to a call that computes nothing."""

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
"""Pauses before connecting again: doubled each time, until a session has lived for `MAX_PAUSE_S`."""


class _OpenSequence:
    """See `gateway.worker_protocols.OpenSequence`."""

    __slots__ = ("_client", "_stream_id")

    def __init__(self, client: GrpcDecodeClient, stream_id: int) -> None:
        self._client = client
        self._stream_id = stream_id

    def cancel(self) -> None:
        self._client._cancel(self._stream_id)


class GrpcDecodeClient:
    """See `gateway.worker_protocols.DecodeClient`. Works while `run` does.

    Args:
        on_change: called when the session is lost or comes back, and when a retired client becomes idle.
    """

    def __init__(self, info: WorkerInfo, *, gateway_id: str, on_change: Callable[[], None]) -> None:
        self.info = info
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._channel = open_channel(info.control_address)
        self._stub = decode_pb2_grpc.DecodeStub(self._channel)  # type: ignore[no-untyped-call]
        self._is_connected = True
        self._is_retired = False
        self._stream_ids = count(1)
        self._listeners: dict[int, DecodeListener] = {}
        self._to_send: asyncio.Queue[decode_pb2.SessionUp] = asyncio.Queue()

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, or the first one is being made: what is opened meanwhile waits for it."""
        return self._is_connected

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is open."""
        return not self._listeners

    def retire(self) -> None:
        """The worker has left: nothing more will be opened, and what is open may end."""
        self._is_retired = True

    async def run(self) -> None:
        """Keep a session, until cancelled; then close."""
        pause_s = MIN_PAUSE_S
        try:
            while True:
                started_s = asyncio.get_running_loop().time()
                error = await self._serve_session()
                self._lose(error)
                if asyncio.get_running_loop().time() - started_s > MAX_PAUSE_S:
                    pause_s = MIN_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                await self._channel.channel_ready()
                self._is_connected = True
                logger.info("decode worker %s is back", self.info.worker_id)
                self._on_change()
        finally:
            await self._channel.close()

    def open(
        self, request: SequenceRequest, key: HandoffKey, *, source: WorkerInfo | None, listener: DecodeListener
    ) -> _OpenSequence:
        if not self._is_connected:
            raise WorkerLostError(f"no session with decode worker {self.info.worker_id}", hop="decode")
        stream_id = next(self._stream_ids)
        trace_context: dict[str, str] = {}
        inject(trace_context)
        opening = decode_pb2.Open(
            stream_id=stream_id,
            key=convert.key_to_proto(key),
            sequence=convert.sequence_to_proto(request),
            choice_index=request.choice_index,
            incarnation=self.info.incarnation,
            trace_context=trace_context,
        )
        if source is not None:
            opening.source.worker_id = source.worker_id
            opening.source.incarnation = source.incarnation
            opening.source.transfer_address = source.transfer_address
        self._listeners[stream_id] = listener
        self._to_send.put_nowait(decode_pb2.SessionUp(open=opening))
        return _OpenSequence(self, stream_id)

    async def abort(self, request_id: RequestId) -> int:
        request = decode_pb2.AbortRequest(request_id=request_id)
        try:
            response = await self._stub.Abort(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="decode") from error
        num_aborted: int = response.num_aborted
        return num_aborted

    async def reset_prefix_cache(self) -> bool:
        request = decode_pb2.ResetPrefixCacheRequest()
        try:
            response = await self._stub.ResetPrefixCache(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="decode") from error
        is_reset: bool = response.is_reset
        return is_reset

    def _cancel(self, stream_id: int) -> None:
        if self._forget(stream_id) is not None:
            self._to_send.put_nowait(decode_pb2.SessionUp(cancel=decode_pb2.Cancel(stream_id=stream_id)))

    def _forget(self, stream_id: int) -> DecodeListener | None:
        listener = self._listeners.pop(stream_id, None)
        if self._is_retired and self.is_idle:
            self._on_change()
        return listener

    async def _serve_session(self) -> WeirError:
        """One session to its end; returns why it ended."""
        call = self._stub.Session()
        try:
            async with asyncio.TaskGroup() as tasks:
                writer = tasks.create_task(self._write(call))
                try:
                    return await self._read(call)
                finally:
                    writer.cancel()
        finally:
            call.cancel()

    async def _read(self, call: grpc.aio.StreamStreamCall) -> WeirError:
        try:
            async for message in call:
                for event in message.events:
                    self._tell(event)
        except grpc.aio.AioRpcError as error:
            return translate(error, hop="decode")
        return WorkerLostError(f"decode worker {self.info.worker_id} ended the session", hop="decode")

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        hello = decode_pb2.Hello(gateway_id=self._gateway_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX)
        try:
            await call.write(decode_pb2.SessionUp(hello=hello))
            while True:
                await call.write(await self._to_send.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("the session is over for the writer; the reader says why: %s", error)

    def _tell(self, event: decode_pb2.Event) -> None:
        """Pass one event on. A fault in it, or in its listener, ends that sequence alone."""
        is_last = _is_last(event)
        listener = self._forget(event.stream_id) if is_last else self._listeners.get(event.stream_id)
        if listener is None:
            return  # cancelled meanwhile
        try:
            _deliver(event, listener)
        except WeirError as error:
            logger.warning("decode worker %s sent what it may not: %s", self.info.worker_id, error.message)
            self._cancel(event.stream_id)
            listener.on_failed(HopFailedError(f"decode sent what it may not: {error.message}", hop="decode"))
        except Exception:
            logger.exception("an event of a decode worker could not be dealt with")
            self._cancel(event.stream_id)
            listener.on_failed(HopFailedError("the gateway failed on this request; its log says why", hop="gateway"))

    def _lose(self, error: WeirError) -> None:
        """The session is over: fail what was on it; first of all, be found lost by whoever looks for a worker."""
        logger.warning("decode worker %s was lost: %s", self.info.worker_id, error.message)
        self._is_connected = False
        listeners, self._listeners = self._listeners, {}
        self._to_send = asyncio.Queue()
        self._on_change()
        for listener in listeners.values():
            listener.on_failed(WorkerLostError(error.message, hop="decode"))


def _is_last(event: decode_pb2.Event) -> bool:
    """Whether the worker forgets the sequence with this event."""
    news = event.WhichOneof("news")
    return news in ("denied", "failed") or (news == "delta" and event.delta.finish_reason != 0)


def _deliver(event: decode_pb2.Event, listener: DecodeListener) -> None:
    """Raises InvalidRequestError for what makes no sense."""
    match event.WhichOneof("news"):
        case "delta":
            listener.on_delta(
                convert.delta_from_proto(event.delta),
                convert.prompt_logprobs_from_proto(event.delta.prompt_logprobs),
                convert.timings_from_proto(event.delta),
            )
        case "granted":
            listener.on_granted()
        case "denied":
            listener.on_denied(event.denied.retry_after_ms / 1000)
        case "failed":
            listener.on_failed(convert.error_from_proto(event.failed))
        case _:
            pass  # of a later version, which says no more than this one needs
