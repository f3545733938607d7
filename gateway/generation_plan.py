"""From a checked request and its prompts to the generation that serves it: one rule for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.choices import ChoiceFormat
from gateway.generation import Generation
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.prompt_request import PromptRequest
from gateway.prompts import PreparedPrompt
from gateway.sampling import sampling_params
from gateway.services import GatewayServices
from weir.core.deadline import Deadline
from weir.core.request import RequestId
from weir.runtime import logs
from weir.text.stop_strings import StopStrings


def plan_generation(
    request: CompletionRequest | ChatCompletionRequest,
    services: GatewayServices,
    model: ServedModel,
    prompts: Sequence[PreparedPrompt],
    *,
    answer_id: str,
    arrived_s: float,
    deadline: Deadline,
    label: str,
) -> Generation:
    """Not started yet; from here on the log names the answer.

    Args:
        answer_id: minted here in the gateway. A lone prompt's request id is the answer's; several are numbered behind
            it.
        deadline: the caller's own; the setting `request_timeout_s` may come before it.
        label: the client's own id where the request has none.

    Raises:
        InvalidRequestError: see `sampling_params`.
    """
    logs.request_id.set(answer_id)
    smallest = min(prompt.max_tokens for prompt in prompts)
    sampling = sampling_params(request, model, services.http, max_tokens=smallest)
    earliest = deadline.earlier(Deadline(arrived_s + services.http.request_timeout_s))
    requests = [
        PromptRequest(
            request_id=RequestId(answer_id if len(prompts) == 1 else f"{answer_id}-{index}"),
            card=model.card,
            prompt_token_ids=prompt.token_ids,
            sampling=replace(sampling, max_tokens=prompt.max_tokens),
            n=request.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline=earliest,
            label=request.request_id or label,
            arrived_s=arrived_s,
        )
        for index, prompt in enumerate(prompts)
    ]
    return Generation(services.pipeline, requests, _choice_format(request, model))


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
