"""Between `weir.core` values and protobuf messages, both ways and without loss.

The only module here written by hand. It knows messages and values, no channel and no service; a value that no correct
peer sends is refused as InvalidRequestError.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from protos import common_pb2, decode_pb2
from weir.core.deadline import Clock, Deadline
from weir.core.errors import InvalidRequestError, WeirError, error_from_dict
from weir.core.request import (
    FinishReason,
    FirstToken,
    HandoffId,
    HandoffKey,
    HandoffTimings,
    RequestId,
    SamplingParams,
    SequenceRequest,
    TokenDelta,
    TokenLogprobs,
)

_FINISH_REASON_TO_PROTO = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_REASON_FROM_PROTO = {number: reason for reason, number in _FINISH_REASON_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASON_TO_PROTO[reason]


def finish_reason_from_proto(number: int) -> FinishReason | None:
    """None while the sequence goes on. Raises InvalidRequestError for a reason of a later version."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    try:
        return _FINISH_REASON_FROM_PROTO[number]
    except KeyError as exc:
        raise InvalidRequestError(f"finish_reason {number} is unknown to this version", param="finish_reason") from exc


def key_to_proto(key: HandoffKey) -> common_pb2.HandoffKey:
    return common_pb2.HandoffKey(handoff_id=key.handoff_id, epoch=key.epoch)


def key_from_proto(message: common_pb2.HandoffKey) -> HandoffKey:
    """Raises InvalidRequestError for a key without an id."""
    if not message.handoff_id:
        raise InvalidRequestError("a hand-off key needs a handoff_id", param="handoff_id")
    return HandoffKey(HandoffId(message.handoff_id), message.epoch)


def sampling_to_proto(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=[common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        allowed_token_ids=(
            None
            if sampling.allowed_token_ids is None
            else common_pb2.TokenSequence(token_ids=sampling.allowed_token_ids)
        ),
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words_token_ids],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        seed=message.seed,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=(
            tuple(message.allowed_token_ids.token_ids) if message.HasField("allowed_token_ids") else None
        ),
        bad_words_token_ids=tuple(tuple(word.token_ids) for word in message.bad_words),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def sequence_to_proto(request: SequenceRequest, clock: Clock = time.monotonic) -> common_pb2.SequenceSpec:
    """What all choices of a prompt share; `sequence_id` and `choice_index` travel beside it."""
    return common_pb2.SequenceSpec(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        resumed_output_token_ids=request.resumed_output_token_ids,
        sampling=sampling_to_proto(request.sampling),
        priority=request.priority,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        remaining_ms=request.deadline.remaining_ms(clock),
    )


def sequence_from_proto(
    message: common_pb2.SequenceSpec, *, sequence_id: str, choice_index: int = 0, clock: Clock = time.monotonic
) -> SequenceRequest:
    """One choice of the prompt. Raises InvalidRequestError for a prompt or an output limit of no tokens."""
    if not message.prompt_token_ids:
        raise InvalidRequestError("a prompt needs at least one token", param="prompt_token_ids")
    if not message.sampling.max_tokens:
        raise InvalidRequestError("max_tokens 0 is below its least value 1", param="max_tokens")
    return SequenceRequest(
        request_id=RequestId(message.request_id),
        sequence_id=sequence_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        choice_index=choice_index,
        resumed_output_token_ids=tuple(message.resumed_output_token_ids),
        priority=message.priority,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        deadline=Deadline.from_remaining_ms(message.remaining_ms, clock),
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        rank=message.rank,
        top_token_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def first_token_to_proto(first_token: FirstToken) -> common_pb2.FirstToken:
    return common_pb2.FirstToken(
        choice_index=first_token.choice_index,
        token_id=first_token.token_id,
        logprobs=None if first_token.logprobs is None else logprobs_to_proto(first_token.logprobs),
        finish_reason=finish_reason_to_proto(first_token.finish_reason),
        stop_token_id=first_token.stop_token_id,
    )


def first_token_from_proto(message: common_pb2.FirstToken) -> FirstToken:
    return FirstToken(
        choice_index=message.choice_index,
        token_id=message.token_id,
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=finish_reason_from_proto(message.finish_reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def delta_to_proto(
    delta: TokenDelta,
    *,
    prompt_logprobs: Iterable[TokenLogprobs] = (),
    timings: HandoffTimings | None = None,
) -> decode_pb2.Delta:
    return decode_pb2.Delta(
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_proto(each) for each in delta.logprobs],
        finish_reason=finish_reason_to_proto(delta.finish_reason),
        stop_token_id=delta.stop_token_id,
        num_cached_tokens=delta.num_cached_tokens,
        prompt_logprobs=[logprobs_to_proto(each) for each in prompt_logprobs],
        timings=None if timings is None else timings_to_proto(timings),
    )


def delta_from_proto(message: decode_pb2.Delta) -> TokenDelta:
    """The tokens alone; see `prompt_logprobs_from_proto` and `timings_from_proto` for what may come with them."""
    return TokenDelta(
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(each) for each in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        num_cached_tokens=message.num_cached_tokens,
    )


def prompt_logprobs_from_proto(messages: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs_from_proto(each) for each in messages)


def timings_to_proto(timings: HandoffTimings) -> decode_pb2.HandoffTimings:
    return decode_pb2.HandoffTimings(
        transfer_us=seconds_to_us(timings.transfer_s),
        exposed_us=seconds_to_us(timings.exposed_s),
        first_step_us=seconds_to_us(timings.first_step_s),
        size_bytes=timings.size_bytes,
    )


def timings_from_proto(message: decode_pb2.Delta) -> HandoffTimings | None:
    """The timings in a delta, if it carries any."""
    if not message.HasField("timings"):
        return None
    return HandoffTimings(
        transfer_s=message.timings.transfer_us / 1e6,
        exposed_s=message.timings.exposed_us / 1e6,
        first_step_s=message.timings.first_step_us / 1e6,
        size_bytes=message.timings.size_bytes,
    )


def seconds_to_us(seconds: float) -> int:
    """Wire form of a duration; what a clock's jitter made negative is 0."""
    return max(0, round(seconds * 1e6))


def error_to_proto(error: WeirError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        error=type(error).__name__,
        message=error.message,
        param=error.param or "",
        hop=error.hop or "",
        retry_after_s=error.retry_after_s or 0.0,
    )


def error_from_proto(message: common_pb2.ErrorDetail) -> WeirError:
    """The same class again; one this version does not know becomes WeirError."""
    return error_from_dict(
        {
            "error": message.error,
            "message": message.message,
            "param": message.param or None,
            "hop": message.hop or None,
            "retry_after_s": message.retry_after_s or None,
        }
    )
