"""Between the public gRPC messages and what the gateway works with; requests become those of the HTTP interface.

So both interfaces share one validation, one set of defaults and one set of refusals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.choices import ChoiceDelta, ChoiceToken
from gateway.generation import Usage
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.request_body import check_fields
from protos import inference_pb2
from weir.core.errors import InvalidRequestError
from weir.text.tokenizer import Tokenizer

_SAME_NAME = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "n", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)
"""Optional fields of `SamplingParams` that the HTTP interface calls the same."""


def checked_request(request: inference_pb2.GenerateRequest) -> CompletionRequest | ChatCompletionRequest:
    """The request as the HTTP interface would have it.

    Raises:
        InvalidRequestError: a field is missing or wrong.
        UnsupportedFeatureError: a field or value that is refused by name.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {
        field.name: _number(value) for field, value in sampling.ListFields() if field.name in _SAME_NAME
    }
    fields["model"] = request.model or None
    fields["stop"] = list(sampling.stop) or None
    fields["stop_token_ids"] = list(sampling.stop_token_ids) or None
    fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None
    fields["return_token_ids"] = request.return_token_ids
    fields["priority"] = request.priority
    fields["cache_salt"] = request.cache_salt or None
    fields["request_id"] = request.request_id or None
    if sampling.HasField("constraint"):
        fields["structured_outputs"] = {sampling.constraint.WhichOneof("kind") or "": True}
    kind = request.WhichOneof("input")
    if kind == "chat":
        if sampling.HasField("logprobs"):
            fields |= {"logprobs": True, "top_logprobs": sampling.logprobs}
        return check_fields({**fields, "messages": chat_messages(request.chat)}, ChatCompletionRequest)
    if kind is None:
        raise InvalidRequestError("input: one of text, chat and token_ids is needed", param="input")
    if sampling.HasField("logprobs"):
        fields["logprobs"] = sampling.logprobs
    prompt = request.text if kind == "text" else list(request.token_ids.ids)
    return check_fields({**fields, "prompt": prompt}, CompletionRequest)


def chat_messages(chat: inference_pb2.ChatMessages) -> list[dict[str, Any]]:
    """Messages as JSON has them."""
    return [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in chat.messages
    ]


def delta_message(delta: ChoiceDelta, tokenizer: Tokenizer, *, with_ids: bool) -> inference_pb2.GenerateResponse:
    """What one step adds to a choice."""
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(
            index=delta.index,
            text=delta.text,
            token_ids=[token.token_id for token in delta.tokens] if with_ids else (),
            logprobs=_logprobs(delta.tokens, tokenizer),
        )
    )


def complete_message(delta: ChoiceDelta, usage: Usage | None) -> inference_pb2.GenerateResponse:
    """The end of a choice; with `usage` that of the request."""
    complete = inference_pb2.Complete(index=delta.index, finish_reason=delta.finish_reason or "")
    if isinstance(delta.stop_reason, str):
        complete.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        complete.stop_token_id = delta.stop_reason
    if usage is not None:
        complete.usage.prompt_tokens = usage.prompt_tokens
        complete.usage.completion_tokens = usage.completion_tokens
        complete.usage.cached_tokens = usage.cached_tokens
    return inference_pb2.GenerateResponse(complete=complete)


def model_message(model: ServedModel) -> inference_pb2.Model:
    card = model.card
    return inference_pb2.Model(id=card.name, created_s=card.created_s, max_model_len=model.max_model_len)


def _number(value: Any) -> Any:
    """A float of a message has 32 bits: 0.1 must not become 0.10000000149."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _logprobs(tokens: Sequence[ChoiceToken], tokenizer: Tokenizer) -> list[inference_pb2.Logprobs]:
    return [
        inference_pb2.Logprobs(
            token_id=token.token_id,
            token=tokenizer.token_text(token.token_id),
            logprob=token.logprobs.logprob,
            top=[
                inference_pb2.TopLogprob(token_id=token_id, token=tokenizer.token_text(token_id), logprob=logprob)
                for token_id, logprob in zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
            ],
        )
        for token in tokens
        if token.logprobs is not None
    ]
