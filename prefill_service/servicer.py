"""The gRPC face of a prefill worker: converts, calls one method, converts back."""

from __future__ import annotations

import grpc

from prefill_service.worker import HandoffChoice, PrefillWorker
from protos import convert, prefill_pb2, prefill_pb2_grpc
from weir.core.request import RequestId
from weir.core.worker import Incarnation

SERVICE_NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """`weir.prefill.v1.Prefill`; errors leave through the server's interceptor."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        choices = tuple(
            HandoffChoice(
                choice_index=choice.choice_index,
                key=convert.key_from_proto(choice.key),
                decode_incarnation=Incarnation(choice.decode_incarnation),
            )
            for choice in request.choices
        )
        sequence_id = f"{choices[0].key.handoff_id}/{choices[0].key.epoch}" if choices else ""
        result = await self._worker.prefill(
            convert.sequence_from_proto(request.sequence, sequence_id=sequence_id),
            choices,
            incarnation=Incarnation(request.incarnation),
        )
        return prefill_pb2.PrefillResponse(
            first_tokens=[convert.first_token_to_proto(token) for token in result.first_tokens],
            num_cached_tokens=result.num_cached_tokens,
            prompt_logprobs=[convert.logprobs_to_proto(each) for each in result.prompt_logprobs],
            queue_us=convert.seconds_to_us(result.queue_s),
            prefill_us=convert.seconds_to_us(result.prefill_s),
        )

    async def Release(
        self, request: prefill_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ReleaseResponse:
        num_released = self._worker.release([convert.key_from_proto(key) for key in request.keys])
        return prefill_pb2.ReleaseResponse(num_released=num_released)

    async def Rebind(
        self, request: prefill_pb2.RebindRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.RebindResponse:
        self._worker.rebind(convert.key_from_proto(request.key), Incarnation(request.decode_incarnation))
        return prefill_pb2.RebindResponse()

    async def Renew(
        self, request: prefill_pb2.RenewRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.RenewResponse:
        lost = self._worker.renew([convert.key_from_proto(key) for key in request.keys])
        return prefill_pb2.RenewResponse(lost=[convert.key_to_proto(key) for key in lost])

    async def Abort(
        self, request: prefill_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.AbortResponse:
        return prefill_pb2.AbortResponse(num_aborted=self._worker.abort(RequestId(request.request_id)))

    async def ResetPrefixCache(
        self, request: prefill_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ResetPrefixCacheResponse:
        return prefill_pb2.ResetPrefixCacheResponse(is_reset=await self._worker.reset_prefix_cache())
