from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2, convert, decode_pb2
from weir.core.deadline import Deadline
from weir.core.errors import InvalidRequestError, OverloadedError, WeirError, all_error_classes
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

token_ids = st.integers(0, 2**32 - 1)
token_tuples = st.lists(token_ids, max_size=8).map(tuple)
reals = st.floats(allow_nan=False)
float32s = st.floats(allow_nan=False, width=32)
counts = st.integers(0, 2**32 - 1)
finish_reasons = st.sampled_from([None, *FinishReason])

sampling_params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=reals,
    top_p=reals,
    top_k=counts,
    min_p=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    repetition_penalty=reals,
    max_tokens=st.integers(1, 2**32 - 1),
    min_tokens=counts,
    ignore_eos=st.booleans(),
    stop_token_ids=token_tuples,
    logit_bias=st.lists(st.tuples(token_ids, reals), max_size=4).map(tuple),
    allowed_token_ids=st.none() | token_tuples,
    bad_words_token_ids=st.lists(token_tuples, max_size=3).map(tuple),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
)
sequence_requests = st.builds(
    SequenceRequest,
    request_id=st.text(max_size=8).map(RequestId),
    sequence_id=st.text(max_size=8),
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=8).map(tuple),
    sampling=sampling_params,
    choice_index=counts,
    resumed_output_token_ids=token_tuples,
    priority=st.integers(-(2**31), 2**31 - 1),
    adapter=st.text(max_size=8),
    cache_salt=st.text(max_size=8),
    deadline=st.just(Deadline.never()) | st.integers(1, 10**9).map(lambda ms: Deadline(ms / 1000)),
)
logprobs = st.builds(
    TokenLogprobs,
    token_id=token_ids,
    logprob=float32s,
    rank=counts,
    top_token_ids=token_tuples,
    top_logprobs=st.lists(float32s, max_size=8).map(tuple),
)
deltas = st.builds(
    TokenDelta,
    first_index=counts,
    token_ids=token_tuples,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=finish_reasons,
    stop_token_id=st.none() | token_ids,
    num_cached_tokens=counts,
)
first_tokens = st.builds(
    FirstToken,
    choice_index=counts,
    token_id=token_ids,
    logprobs=st.none() | logprobs,
    finish_reason=finish_reasons,
    stop_token_id=st.none() | token_ids,
)


@given(sequence_requests)
def test_a_sequence_survives_the_wire(request_: SequenceRequest) -> None:
    raw = convert.sequence_to_proto(request_, clock=lambda: 0.0).SerializeToString()
    back = convert.sequence_from_proto(
        common_pb2.SequenceSpec.FromString(raw),
        sequence_id=request_.sequence_id,
        choice_index=request_.choice_index,
        clock=lambda: 0.0,
    )
    assert back.deadline.at_s == pytest.approx(request_.deadline.at_s, abs=0.002)
    assert back.sampling == request_.sampling
    fields = [name for name in SequenceRequest.__slots__ if name != "deadline"]
    assert [getattr(back, name) for name in fields] == [getattr(request_, name) for name in fields]


@given(deltas, st.lists(logprobs, max_size=3).map(tuple))
def test_a_delta_survives_the_wire(delta: TokenDelta, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
    raw = convert.delta_to_proto(delta, prompt_logprobs=prompt_logprobs).SerializeToString()
    message = decode_pb2.Delta.FromString(raw)
    assert convert.delta_from_proto(message) == delta
    assert convert.prompt_logprobs_from_proto(message.prompt_logprobs) == prompt_logprobs
    assert convert.timings_from_proto(message) is None


@given(first_tokens)
def test_a_first_token_survives_the_wire(first_token: FirstToken) -> None:
    raw = convert.first_token_to_proto(first_token).SerializeToString()
    assert convert.first_token_from_proto(common_pb2.FirstToken.FromString(raw)) == first_token


@given(st.text(min_size=1, max_size=20), counts)
def test_a_key_survives_the_wire(handoff_id: str, epoch: int) -> None:
    key = HandoffKey(HandoffId(handoff_id), epoch)
    assert convert.key_from_proto(convert.key_to_proto(key)) == key


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.integers(0, 2**63))
def test_timings_survive_the_wire_to_the_microsecond(seconds: list[float], size_bytes: int) -> None:
    timings = HandoffTimings(
        transfer_s=seconds[0], exposed_s=seconds[1], first_step_s=seconds[2], size_bytes=size_bytes
    )
    delta = TokenDelta(first_index=0, token_ids=(1,))
    back = convert.timings_from_proto(convert.delta_to_proto(delta, timings=timings))
    assert back is not None
    assert back.size_bytes == size_bytes
    assert math.isclose(back.transfer_s, timings.transfer_s, abs_tol=1e-6)
    assert math.isclose(back.exposed_s, timings.exposed_s, abs_tol=1e-6)
    assert math.isclose(back.first_step_s, timings.first_step_s, abs_tol=1e-6)


@pytest.mark.parametrize("cls", all_error_classes())
def test_an_error_keeps_its_class_and_what_it_says(cls: type[WeirError]) -> None:
    error = cls("no more of it", param="prompt", hop="transfer", retry_after_s=1.5)
    back = convert.error_from_proto(convert.error_to_proto(error))
    assert type(back) is cls
    assert back.to_dict() == error.to_dict()


def test_an_error_without_details_gains_none() -> None:
    back = convert.error_from_proto(convert.error_to_proto(OverloadedError("full")))
    assert (back.param, back.hop, back.retry_after_s) == (None, None, None)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_every_finish_reason_has_a_number(reason: FinishReason | None) -> None:
    assert convert.finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (common_pb2.SequenceSpec(sampling=common_pb2.SamplingParams(max_tokens=1)), "prompt_token_ids"),
        (common_pb2.SequenceSpec(prompt_token_ids=[1]), "max_tokens"),
    ],
)
def test_a_sequence_that_can_never_run_is_refused_by_name(spec: common_pb2.SequenceSpec, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert.sequence_from_proto(spec, sequence_id="s")
    assert caught.value.param == param


def test_a_key_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        convert.key_from_proto(common_pb2.HandoffKey(epoch=1))


def test_a_finish_reason_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="99"):
        convert.finish_reason_from_proto(99)
