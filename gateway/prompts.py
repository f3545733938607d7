"""From what a client sent to prompt token ids, checked against the model: vocabulary and context.

Workers see ids only. Everything that can be refused without a worker is refused here, before any header leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.http_settings import HttpSettings
from gateway.model_store import ServedModel
from gateway.openai_api import DEFAULT_MAX_TOKENS, ChatCompletionRequest, ChatFields, CompletionRequest
from gateway.openai_fields import Prompt
from weir.core.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError
from weir.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt, ready to be computed.

    Attributes:
        max_tokens: most output tokens: what was asked for, else the default within the context.
        text: what `echo` repeats; empty without it.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    text: str = ""


async def prepare_completion(
    request: CompletionRequest, model: ServedModel, settings: HttpSettings
) -> tuple[PreparedPrompt, ...]:
    """The prompts of a completion, in order.

    Raises:
        InvalidRequestError: a prompt without tokens, an id outside the vocabulary, too many prompts.
        ContextLengthError: prompt and asked tokens exceed the context.
    """
    if len(request.prompt) > settings.max_prompts:
        raise InvalidRequestError(
            f"prompt: {len(request.prompt)} prompts in one request, the limit is {settings.max_prompts}", param="prompt"
        )
    num_choices = len(request.prompt) * request.n
    if num_choices > settings.max_choices:
        raise InvalidRequestError(
            f"n: {len(request.prompt)} prompts with n {request.n} are {num_choices} choices in one request, the limit "
            f"is {settings.max_choices}",
            param="n",
        )
    prepared: list[PreparedPrompt] = []
    for index, prompt in enumerate(request.prompt):
        param = f"prompt[{index}]" if len(request.prompt) > 1 else "prompt"
        token_ids = await _completion_ids(request, prompt, model, param)
        token_ids = _truncate(token_ids, request.truncate_prompt_tokens, request.asked_max_tokens, model)
        max_tokens = _output_limit(request.asked_max_tokens, DEFAULT_MAX_TOKENS, len(token_ids), model, param)
        text = ""
        if request.echo:
            text = prompt if isinstance(prompt, str) else model.tokenizer.decode(token_ids, skip_special_tokens=False)
        prepared.append(PreparedPrompt(token_ids=token_ids, max_tokens=max_tokens, text=text))
    return tuple(prepared)


async def prepare_chat(request: ChatCompletionRequest, model: ServedModel, settings: HttpSettings) -> PreparedPrompt:
    """The prompt of a chat.

    Raises:
        InvalidRequestError: the chat template refuses the messages.
        UnsupportedFeatureError: no template, or one that came with the request and is not trusted.
        ContextLengthError: prompt and asked tokens exceed the context.
    """
    token_ids = await chat_ids(request, model, settings, truncates=request.truncate_prompt_tokens is not None)
    token_ids = _truncate(token_ids, request.truncate_prompt_tokens, request.asked_max_tokens, model)
    last = request.messages[-1]
    return PreparedPrompt(
        token_ids=token_ids,
        max_tokens=_output_limit(request.asked_max_tokens, None, len(token_ids), model, "messages"),
        text=last.content if request.echo and last.role == "assistant" else "",
    )


async def chat_ids(
    request: ChatFields, model: ServedModel, settings: HttpSettings, *, truncates: bool = False
) -> tuple[int, ...]:
    """Token ids of rendered messages; raises as `prepare_chat`."""
    text = _template(request, model, settings).render(
        [message.for_template() for message in request.messages],
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )
    return await encode_text(
        text, model, param="messages", add_special_tokens=request.add_special_tokens, truncates=truncates
    )


async def encode_text(
    text: str, model: ServedModel, *, param: str, add_special_tokens: bool, truncates: bool = False
) -> tuple[int, ...]:
    """Token ids of a text. What can't fit the context by its length alone is not even tokenized.

    Raises:
        ContextLengthError: more characters than the longest tokens could spell.
    """
    most_chars = model.max_model_len * model.tokenizer.max_token_chars
    if len(text) > most_chars and not truncates:
        raise ContextLengthError(
            f"{param}: {len(text)} characters are more than the {model.max_model_len} tokens of this model's "
            f"context can hold",
            param=param,
        )
    return await model.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


def check_vocabulary(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raises InvalidRequestError for an id that the model has no row for."""
    limit = model.card.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limit):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limit)
        raise InvalidRequestError(f"{param}: token id {str(wrong)[:24]} is outside 0 to {limit - 1}", param=param)


async def _completion_ids(
    request: CompletionRequest, prompt: Prompt, model: ServedModel, param: str
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        check_vocabulary(prompt, model, param)
        return prompt
    return await encode_text(
        prompt,
        model,
        param=param,
        add_special_tokens=request.add_special_tokens,
        truncates=request.truncate_prompt_tokens is not None,
    )


def _template(request: ChatFields, model: ServedModel, settings: HttpSettings) -> ChatTemplate:
    if request.chat_template is not None:
        if not settings.trust_request_chat_template:
            raise UnsupportedFeatureError(
                "chat_template: a template is a program; the gateway takes one from a request only when it is started "
                "with --trust-request-chat-template",
                param="chat_template",
            )
        return ChatTemplate(request.chat_template, special_tokens=model.tokenizer.special_tokens)
    if model.chat_template is None:
        raise UnsupportedFeatureError(
            f"messages: model {model.card.name!r} has no chat template; use /v1/completions", param="messages"
        )
    return model.chat_template


def _truncate(
    token_ids: tuple[int, ...], limit: int | None, asked_max_tokens: int | None, model: ServedModel
) -> tuple[int, ...]:
    """Keep the last `limit` tokens; -1 keeps what fits the context beside the asked (or one) output tokens."""
    if limit == -1:
        limit = max(1, model.max_model_len - (asked_max_tokens or 1))
    return token_ids if limit is None else token_ids[-limit:]


def _output_limit(asked: int | None, default: int | None, num_prompt: int, model: ServedModel, param: str) -> int:
    """Most output tokens of a prompt.

    Raises:
        InvalidRequestError: there is no prompt to continue.
        ContextLengthError: prompt and output don't fit the context.
    """
    if not num_prompt:
        raise InvalidRequestError(f"{param}: has no tokens; at least 1 is needed", param=param)
    context = model.max_model_len
    room = context - num_prompt
    wanted = asked if asked is not None else 1
    if wanted > room:
        param = param if num_prompt >= context else "max_tokens"
        raise ContextLengthError(
            f"{param}: the prompt has {num_prompt} tokens and {wanted} are asked for, together "
            f"{num_prompt + wanted}; this model's context is {context} tokens",
            param=param,
        )
    if asked is not None:
        return asked
    return room if default is None else min(default, room)
