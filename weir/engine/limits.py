"""What one engine can ever run: refuses a request before it costs anything. It sees no state that changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from weir.core.errors import (
    CapacityExceededError,
    ContextLengthError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from weir.core.request import SamplingParams, SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Bounds of one engine.

    Attributes:
        max_model_len: longest sequence, prompt and output together, in tokens.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def blocks_for_whole(self, num_tokens: int) -> int:
        """Blocks of a sequence that ends with `num_tokens` tokens; the KV of the last one is never computed."""
        return -(-(num_tokens - 1) // self.block_size)

    def check(self, request: SequenceRequest, *, is_prefill_only: bool) -> None:
        """Refuse what can never run here.

        Raises:
            InvalidRequestError: an empty prompt, a token id outside the vocabulary, nothing left to generate, or a
                sampling value that means nothing.
            ContextLengthError: prompt and asked tokens exceed `max_model_len`.
            CapacityExceededError: the sequence can never fit the pool.
            UnsupportedFeatureError: an adapter.
        """
        if request.adapter:
            raise UnsupportedFeatureError(f"adapter {request.adapter!r}: this engine has none", param="model")
        self._check_token_ids(request)
        _check_sampling(request.sampling)
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if not num_prompt_tokens:
            raise InvalidRequestError("the prompt is empty: it has 0 tokens", param="prompt")
        if len(request.resumed_output_token_ids) >= max_tokens:
            raise InvalidRequestError(
                f"{len(request.resumed_output_token_ids)} output tokens exist already and max_tokens is {max_tokens}",
                param="max_tokens",
            )
        if request.max_total_tokens > self.max_model_len:
            raise ContextLengthError(
                f"the context is {self.max_model_len} tokens; the prompt has {num_prompt_tokens} and max_tokens asks "
                f"for {max_tokens} more",
                param="max_tokens",
            )
        whole = request.num_known_tokens + 1 if is_prefill_only else request.max_total_tokens
        needed = self.blocks_for_whole(whole)
        if needed > self.num_blocks:
            raise CapacityExceededError(
                f"the sequence needs {needed} KV blocks of {self.block_size} tokens; the worker has {self.num_blocks}",
                param="max_tokens",
            )

    def _check_token_ids(self, request: SequenceRequest) -> None:
        sampling = request.sampling
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("prompt", request.prompt_token_ids),
            ("prompt", request.resumed_output_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", (token_id for token_id, _ in sampling.logit_bias)),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("bad_words", (token_id for word in sampling.bad_words_token_ids for token_id in word)),
        )
        for param, token_ids in named:
            known = tuple(token_ids)
            for token_id in (min(known, default=0), max(known, default=0)):
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequestError(
                        f"{param}: token id {token_id} is outside the vocabulary of {self.vocab_size}", param=param
                    )
        if sampling.allowed_token_ids == ():
            raise InvalidRequestError("allowed_token_ids is empty", param="allowed_token_ids")
        if () in sampling.bad_words_token_ids:
            raise InvalidRequestError("bad_words: a word has no tokens", param="bad_words")


def _check_sampling(sampling: SamplingParams) -> None:
    for name, is_met, limit in (
        ("temperature", 0 <= sampling.temperature < math.inf, "at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "over 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 0"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, "over 0"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "finite"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "finite"),
    ):
        if not is_met:
            raise InvalidRequestError(f"{name} is {getattr(sampling, name)}; it must be {limit}", param=name)
