"""The two generating endpoints: from a checked request to the response that does its work.

Ids are minted here: what a client sends as its own id is only a label beside ours, since client ids repeat.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from gateway.caller import Caller
from gateway.chat_rendering import ChatRendering
from gateway.completion_rendering import CompletionRendering
from gateway.generation import Generation
from gateway.generation_plan import plan_generation
from gateway.generation_response import GenerationResponse, Prepare
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.prompts import PreparedPrompt, prepare_chat, prepare_completion
from gateway.rendering import Answer, Rendering
from gateway.services import GatewayServices
from weir.core.deadline import Deadline


def create_completion(request: CompletionRequest, services: GatewayServices, caller: Caller) -> GenerationResponse:
    """POST /v1/completions"""

    async def prepare() -> tuple[Generation, Rendering]:
        model = services.models.get(request.model)
        prompts = await prepare_completion(request, model, services.http)
        answer = _answer(request, services, caller, model, prompts, prefix="cmpl")
        return answer.generation, CompletionRendering(request, answer)

    return _response(request, services, caller, prepare, num_prompts=len(request.prompt))


def create_chat_completion(
    request: ChatCompletionRequest, services: GatewayServices, caller: Caller
) -> GenerationResponse:
    """POST /v1/chat/completions"""

    async def prepare() -> tuple[Generation, Rendering]:
        model = services.models.get(request.model)
        prompts = (await prepare_chat(request, model, services.http),)
        answer = _answer(request, services, caller, model, prompts, prefix="chatcmpl")
        return answer.generation, ChatRendering(request, answer)

    return _response(request, services, caller, prepare, num_prompts=1)


def _response(
    request: CompletionRequest | ChatCompletionRequest,
    services: GatewayServices,
    caller: Caller,
    prepare: Prepare,
    *,
    num_prompts: int,
) -> GenerationResponse:
    return GenerationResponse(
        permit=services.admission.admit(caller.api_key, num_prompts=num_prompts, priority=request.priority),
        prepare=prepare,
        settings=services.http,
        is_stream=request.stream,
    )


def _answer(
    request: CompletionRequest | ChatCompletionRequest,
    services: GatewayServices,
    caller: Caller,
    model: ServedModel,
    prompts: Sequence[PreparedPrompt],
    *,
    prefix: str,
) -> Answer:
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    generation = plan_generation(
        request,
        services,
        model,
        prompts,
        answer_id=answer_id,
        arrived_s=caller.arrived_s,
        deadline=Deadline.never(),
        label=caller.label,
    )
    return Answer(answer_id=answer_id, created_s=int(time.time()), model=model, prompts=prompts, generation=generation)
