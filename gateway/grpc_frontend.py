"""`weir.v1.Inference`: the gateway over gRPC, beside its HTTP interface and with the same rules."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc

from gateway.abort import abort_request
from gateway.api_keys import ApiKeys
from gateway.choices import ChoiceDelta
from gateway.generation import Generation
from gateway.generation_plan import plan_generation
from gateway.grpc_messages import chat_messages, checked_request, complete_message, delta_message, model_message
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest
from gateway.prompts import PreparedPrompt, chat_ids, check_vocabulary, encode_text, prepare_chat, prepare_completion
from gateway.request_body import check_fields
from gateway.services import GatewayServices
from protos import inference_pb2, inference_pb2_grpc
from weir import __version__
from weir.core.deadline import Deadline
from weir.core.errors import AuthenticationError, InvalidRequestError
from weir.core.worker import Role

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Errors leave through the server's interceptor; cancelling a call ends its work."""

    def __init__(self, services: GatewayServices) -> None:
        self._services = services
        self._keys = ApiKeys(services.http.api_keys)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        arrived_s = time.monotonic()
        api_key = self._authenticate(context)
        checked = checked_request(request)
        services = self._services
        async with services.admission.admit(api_key, num_prompts=1, priority=checked.priority):
            model = services.models.get(checked.model)
            generation = await self._generation(checked, model, context, arrived_s)
            await generation.run(_Sink(context, generation, model, with_ids=checked.return_token_ids))

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.AbortResponse:
        self._authenticate(context)
        num_aborted = await abort_request(request.request_id, self._services.pipeline, self._services.journal)
        return inference_pb2.AbortResponse(num_aborted=num_aborted)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        self._authenticate(context)
        return inference_pb2.ListModelsResponse(models=map(model_message, self._services.models.models))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.Model:
        self._authenticate(context)
        return model_message(self._services.models.get(request.model or None))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        self._authenticate(context)
        model = self._services.models.get(request.model or None)
        if request.WhichOneof("input") == "chat":
            fields: dict[str, Any] = {"messages": chat_messages(request.chat)}
            if request.HasField("add_special_tokens"):
                fields["add_special_tokens"] = request.add_special_tokens
            chat = check_fields(fields, TokenizeChatRequest)
            token_ids = await chat_ids(chat, model, self._services.http)
        elif request.WhichOneof("input") == "text":
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await encode_text(request.text, model, param="text", add_special_tokens=adds)
        else:
            raise InvalidRequestError("input: one of text and chat is needed", param="input")
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        self._authenticate(context)
        model = self._services.models.get(request.model or None)
        token_ids = tuple(request.token_ids)
        check_vocabulary(token_ids, model, "token_ids")
        return inference_pb2.DetokenizeResponse(text=model.tokenizer.decode(token_ids, skip_special_tokens=False))

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetServerInfoResponse:
        self._authenticate(context)
        roles = [worker.role for worker in self._services.pipeline.clients.fleet.workers]
        return inference_pb2.GetServerInfoResponse(
            version=__version__,
            gateway_id=self._services.pipeline.gateway_id,
            num_prefill_workers=roles.count(Role.PREFILL),
            num_decode_workers=roles.count(Role.DECODE),
        )

    def _authenticate(self, context: grpc.aio.ServicerContext) -> str:
        """The caller's key; every method asks for it first. Raises AuthenticationError."""
        values = [
            value if isinstance(value, bytes) else value.encode()
            for name, value in context.invocation_metadata() or ()
            if name == "authorization"
        ]
        key = self._keys.find(values)
        if key is None:
            raise AuthenticationError("a valid API key is needed: send it in the metadata, `authorization: Bearer KEY`")
        return key

    async def _generation(
        self,
        checked: CompletionRequest | ChatCompletionRequest,
        model: ServedModel,
        context: grpc.aio.ServicerContext,
        arrived_s: float,
    ) -> Generation:
        prompts: Sequence[PreparedPrompt]
        if isinstance(checked, ChatCompletionRequest):
            prompts = (await prepare_chat(checked, model, self._services.http),)
        else:
            prompts = await prepare_completion(checked, model, self._services.http)
        remaining_s = context.time_remaining()
        return plan_generation(
            checked,
            self._services,
            model,
            prompts,
            answer_id=f"grpc-{uuid.uuid4().hex}",
            arrived_s=arrived_s,
            deadline=Deadline.never() if remaining_s is None else Deadline.after(remaining_s),
            label="",
        )


class _Sink:
    """Deltas as messages, then one complete for each choice; the last of them carries the usage."""

    def __init__(
        self, context: grpc.aio.ServicerContext, generation: Generation, model: ServedModel, *, with_ids: bool
    ) -> None:
        self._context = context
        self._generation = generation
        self._model = model
        self._with_ids = with_ids
        self._num_running = generation.num_choices

    async def start(self) -> None:
        """The header tells the caller that the workers have taken it."""
        await self._context.send_initial_metadata(())

    async def write(self, deltas: Sequence[ChoiceDelta]) -> None:
        for delta in deltas:
            if delta.text or delta.tokens:
                await self._context.write(delta_message(delta, self._model.tokenizer, with_ids=self._with_ids))
            if delta.finish_reason is not None:
                self._num_running -= 1
                usage = None if self._num_running else self._generation.usage
                await self._context.write(complete_message(delta, usage))
