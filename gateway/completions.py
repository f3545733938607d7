"""The two generating endpoints: from a checked request to the response that does its work.

Ids are minted here: what a client sends as its own id is only a label beside ours, since client ids repeat.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from gateway.caller import Caller
from gateway.chat_rendering import ChatRendering
from gateway.choices import ChoiceFormat
from gateway.completion_rendering import CompletionRendering
from gateway.generation import Generation
from gateway.generation_response import GenerationResponse, Prepare
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.prompt_request import PromptRequest
from gateway.prompts import PreparedPrompt, prepare_chat, prepare_completion
from gateway.rendering import Answer, Rendering
from gateway.sampling import sampling_params
from gateway.services import GatewayServices
from weir.core.deadline import Deadline
from weir.core.request import RequestId
from weir.runtime import logs
from weir.text.stop_strings import StopStrings


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
    logs.request_id.set(answer_id)
    generation = Generation(
        services.pipeline,
        _prompt_requests(request, services, caller, model, prompts, answer_id),
        _choice_format(request, model),
    )
    return Answer(answer_id=answer_id, created_s=int(time.time()), model=model, prompts=prompts, generation=generation)


def _prompt_requests(
    request: CompletionRequest | ChatCompletionRequest,
    services: GatewayServices,
    caller: Caller,
    model: ServedModel,
    prompts: Sequence[PreparedPrompt],
    answer_id: str,
) -> list[PromptRequest]:
    """One for each prompt. A lone prompt's request id is the answer's; several are numbered behind it."""
    smallest = min(prompt.max_tokens for prompt in prompts)
    sampling = sampling_params(request, model, services.http, max_tokens=smallest)
    return [
        PromptRequest(
            request_id=RequestId(answer_id if len(prompts) == 1 else f"{answer_id}-{index}"),
            card=model.card,
            prompt_token_ids=prompt.token_ids,
            sampling=replace(sampling, max_tokens=prompt.max_tokens),
            n=request.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline=Deadline(caller.arrived_s + services.http.request_timeout_s),
            label=request.request_id or caller.label,
            arrived_s=caller.arrived_s,
        )
        for index, prompt in enumerate(prompts)
    ]


def _choice_format(request: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> ChoiceFormat:
    has_logprobs = request.logprobs is not None and request.logprobs is not False
    return ChoiceFormat(
        tokenizer=model.tokenizer,
        stops=StopStrings(request.stop, include_in_output=request.include_stop_str_in_output) if request.stop else None,
        include_stop=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
        with_tokens=has_logprobs or request.return_token_ids,
        eos_token_ids=frozenset(model.card.eos_token_ids),
    )
