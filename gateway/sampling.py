"""Sampling parameters for the workers, from a checked request: defaults filled in, ids within the vocabulary."""

from __future__ import annotations

import secrets

from gateway.http_settings import HttpSettings
from gateway.model_store import ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.prompts import check_vocabulary
from weir.core.errors import InvalidRequestError
from weir.core.request import SamplingParams
from weir.text.tokenizer import Tokenizer

GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing by it would overflow."""


def sampling_params(
    request: CompletionRequest | ChatCompletionRequest, model: ServedModel, settings: HttpSettings, *, max_tokens: int
) -> SamplingParams:
    """What the engine needs of the request; a missing seed is drawn here.

    Raises:
        InvalidRequestError: a token id outside the vocabulary, or more log-probabilities than allowed.
    """
    check_vocabulary(request.stop_token_ids, model, "stop_token_ids")
    check_vocabulary(request.allowed_token_ids or (), model, "allowed_token_ids")
    check_vocabulary([token_id for token_id, _ in request.logit_bias], model, "logit_bias")
    if request.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens: must be at most max_tokens, which is {max_tokens}, got {request.min_tokens}",
            param="min_tokens",
        )
    num_logprobs = _num_logprobs(request, settings)
    num_prompt_logprobs = request.prompt_logprobs
    if request.echo and isinstance(request, CompletionRequest) and num_prompt_logprobs is None:
        num_prompt_logprobs = num_logprobs
    return SamplingParams(
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        temperature=0.0 if request.temperature < GREEDY_BELOW else request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        bad_words_token_ids=_bad_words(request, model.tokenizer),
        logprobs=num_logprobs,
        prompt_logprobs=_checked(num_prompt_logprobs, settings.max_logprobs, "prompt_logprobs"),
    )


def _num_logprobs(request: CompletionRequest | ChatCompletionRequest, settings: HttpSettings) -> int | None:
    if isinstance(request, CompletionRequest):
        return _checked(request.logprobs, settings.max_logprobs, "logprobs")
    if not request.logprobs:
        return None
    return _checked(request.top_logprobs or 0, settings.max_logprobs, "top_logprobs")


def _checked(asked: int | None, limit: int, param: str) -> int | None:
    if asked is not None and asked > limit:
        raise InvalidRequestError(f"{param}: must be at most {limit}, got {str(asked)[:24]}", param=param)
    return asked


def _bad_words(request: GenerationRequest, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in request.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if token_ids:
                found[token_ids] = None
    return tuple(found)
