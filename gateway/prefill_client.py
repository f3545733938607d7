"""Calls one incarnation of a prefill worker over gRPC: converts, calls, converts back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from gateway.worker_protocols import PrefillChoice, PrefillResult
from protos import convert, prefill_pb2, prefill_pb2_grpc
from weir.core.request import HandoffKey, RequestId, SequenceRequest
from weir.core.worker import Incarnation, WorkerInfo
from weir.runtime.grpc_client import call_metadata, call_timeout_s, open_channel, translate

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 2.0
"""Longest wait for the answer to a call that computes nothing."""

MAX_KEYS_PER_RELEASE = 1024


class GrpcPrefillClient:
    """See `gateway.worker_protocols.PrefillClient`. Works while `run` does.

    Args:
        on_change: called when the connection is lost or comes back, and when a retired client becomes idle.
    """

    def __init__(self, info: WorkerInfo, *, on_change: Callable[[], None]) -> None:
        self.info = info
        self._on_change = on_change
        self._channel = open_channel(info.control_address)
        self._stub = prefill_pb2_grpc.PrefillStub(self._channel)  # type: ignore[no-untyped-call]
        self._is_connected = True
        self._is_retired = False
        self._prefills: set[grpc.aio.Call] = set()
        self._to_release: dict[HandoffKey, str] = {}
        self._has_releases = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether a call has a chance: the connection is up, or was not tried yet."""
        return self._is_connected

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits to be sent."""
        return not (self._prefills or self._to_release)

    def retire(self) -> None:
        """The worker has left: no prompt more will be sent, and what is under way may end."""
        self._is_retired = True

    async def run(self) -> None:
        """Watch the connection and send releases, until cancelled; then close."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_connection())
                tasks.create_task(self._send_releases())
        finally:
            await self._channel.close()

    async def prefill(self, request: SequenceRequest, choices: tuple[PrefillChoice, ...]) -> PrefillResult:
        call = self._stub.Prefill(
            prefill_pb2.PrefillRequest(
                sequence=convert.sequence_to_proto(request),
                choices=[
                    prefill_pb2.PrefillChoice(
                        choice_index=choice.choice_index,
                        key=convert.key_to_proto(choice.key),
                        decode_incarnation=choice.decode_incarnation,
                    )
                    for choice in choices
                ],
                incarnation=self.info.incarnation,
            ),
            timeout=call_timeout_s(request.deadline),
            metadata=call_metadata(request.request_id),
        )
        self._prefills.add(call)
        answered = asyncio.Event()
        call.add_done_callback(lambda call: self._on_answered(call, answered))
        try:
            await answered.wait()  # not the call: grpc.aio leaks 1 KB for each that is cancelled (grpc/grpc#43360)
            response = await call
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="prefill") from error
        return PrefillResult(
            first_tokens=tuple(convert.first_token_from_proto(token) for token in response.first_tokens),
            num_cached_tokens=response.num_cached_tokens,
            prompt_logprobs=convert.prompt_logprobs_from_proto(response.prompt_logprobs),
            queue_s=response.queue_us / 1e6,
            prefill_s=response.prefill_us / 1e6,
        )

    async def rebind(self, key: HandoffKey, decode_incarnation: Incarnation) -> None:
        request = prefill_pb2.RebindRequest(key=convert.key_to_proto(key), decode_incarnation=decode_incarnation)
        try:
            await self._stub.Rebind(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="prefill") from error

    async def renew(self, keys: tuple[HandoffKey, ...]) -> tuple[HandoffKey, ...]:
        request = prefill_pb2.RenewRequest(keys=[convert.key_to_proto(key) for key in keys])
        try:
            response = await self._stub.Renew(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="prefill") from error
        return tuple(convert.key_from_proto(key) for key in response.lost)

    def release(self, keys: tuple[HandoffKey, ...], reason: str) -> None:
        self._to_release.update(dict.fromkeys(keys, reason))
        self._has_releases.set()

    async def abort(self, request_id: RequestId) -> int:
        request = prefill_pb2.AbortRequest(request_id=request_id)
        try:
            response = await self._stub.Abort(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="prefill") from error
        num_aborted: int = response.num_aborted
        return num_aborted

    async def reset_prefix_cache(self) -> bool:
        request = prefill_pb2.ResetPrefixCacheRequest()
        try:
            response = await self._stub.ResetPrefixCache(request, timeout=CONTROL_TIMEOUT_S, metadata=call_metadata())
        except grpc.aio.AioRpcError as error:
            raise translate(error, hop="prefill") from error
        is_reset: bool = response.is_reset
        return is_reset

    async def _watch_connection(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            is_connected = state not in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
            if state is grpc.ChannelConnectivity.CONNECTING:
                is_connected = self._is_connected  # it fails or comes back from here
            if is_connected != self._is_connected:
                self._is_connected = is_connected
                logger.info("prefill worker %s %s", self.info.worker_id, "is back" if is_connected else "was lost")
                self._on_change()
            await self._channel.wait_for_state_change(state)

    async def _send_releases(self) -> None:
        """Many in one call; one that fails is not sent again, since the lease ends what it meant."""
        while True:
            await self._has_releases.wait()
            self._has_releases.clear()
            while self._to_release:
                keys = list(self._to_release)[:MAX_KEYS_PER_RELEASE]
                request = prefill_pb2.ReleaseRequest(
                    keys=[convert.key_to_proto(key) for key in keys], reason=self._to_release[keys[0]]
                )
                try:
                    await self._stub.Release(request, timeout=CONTROL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    reason = translate(error, hop="prefill").message
                    logger.warning("%d holds were not released: %s", len(keys), reason)
                finally:
                    for key in keys:
                        self._to_release.pop(key, None)
            self._tell_if_done()

    def _on_answered(self, call: grpc.aio.Call, answered: asyncio.Event) -> None:
        self._prefills.discard(call)
        answered.set()
        self._tell_if_done()

    def _tell_if_done(self) -> None:
        if self._is_retired and self.is_idle:
            self._on_change()
