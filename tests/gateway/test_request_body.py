"""Rows S10, S12, S14, S16, S32, S33 of cases, as far as no model is needed to tell."""

import pytest

from gateway.openai_api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.request_body import check_fields, decode_json
from weir.core.errors import InvalidRequestError, UnsupportedFeatureError

HI = {"role": "user", "content": "hi"}


def completion(**fields) -> CompletionRequest:
    return check_fields({"prompt": "hi", **fields}, CompletionRequest)


def chat(*messages, **fields) -> ChatCompletionRequest:
    return check_fields({"messages": list(messages or [HI]), **fields}, ChatCompletionRequest)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_s10_numbers_that_are_not_finite_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field}: must be a finite number") as caught:
        decode_json(f'{{"prompt": "hi", "{field}": {value}}}'.encode())
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"logit_bias": {"2": NaN}}', "logit_bias.2"),
        ('{"chat_template_kwargs": {"a": [1, {"b": Infinity}]}}', "chat_template_kwargs.a[1].b"),
        ('{"messages": [{"content": "\\ud800"}]}', "messages[0].content"),
    ],
)
def test_what_json_cannot_write_is_refused_wherever_it_hides(body, path):
    with pytest.raises(InvalidRequestError) as caught:
        decode_json(body.encode())
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "empty"),
        (b'\xef\xbb\xbf{"prompt": "hi"}', "byte order mark"),
        (b'{"prompt": ', "not JSON"),
        (b'{"prompt": "hi"} x', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"n": 1, "n": 2}', "'n': is given twice"),
        (b'{"stream_options": {"include_usage": true, "include_usage": false}}', "given twice"),
    ],
)
def test_s33_bodies_that_are_not_strict_json_are_refused(raw, word):
    with pytest.raises(InvalidRequestError, match=word):
        decode_json(raw)


def test_surrogate_pairs_and_odd_numbers_that_are_json_pass():
    assert decode_json(b'{"a": "\\ud83d\\ude00", "b": 1e2, "c": -0.0}') == {"a": "😀", "b": 100.0, "c": -0.0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream": "false"}, "stream"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 129}, "n"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": [], "stream": True}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias.AI"),
        ({"logit_bias": {"-1": 5}}, "logit_bias.-1"),
        ({"logit_bias": {"2": "x"}}, "logit_bias.2"),
        ({"logit_bias": {"2": 1e9}}, "logit_bias.2"),
        ({"logit_bias": {"2": 1, "02": 1}}, "logit_bias.02"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0]"),
    ],
)
def test_s33_wrong_values_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")
    assert not isinstance(caught.value, UnsupportedFeatureError)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ([], "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([HI, {"role": "bot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_s16_wrong_messages_are_refused_by_place(messages, param):
    with pytest.raises(InvalidRequestError) as caught:
        check_fields({"messages": messages}, ChatCompletionRequest)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"functions": []}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"best_of": 2}, "best_of"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
    ],
)
def test_features_that_are_not_served_are_refused_by_name(fields, param):
    with pytest.raises(UnsupportedFeatureError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0]"),
    ],
)
def test_messages_that_are_not_served_are_refused_by_place(message, param):
    with pytest.raises(UnsupportedFeatureError) as caught:
        chat(message)
    assert caught.value.param == param


def test_suffix_is_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match="suffix"):
        completion(suffix="x")


def test_s12_null_is_not_given_for_every_optional_field():
    for build, model in ((completion, CompletionRequest), (chat, ChatCompletionRequest)):
        optional = {name for name, field in model.model_fields.items() if not field.is_required()}
        nulls = dict.fromkeys(optional | set(model.refused))
        assert build(**nulls) == build()
    assert chat({**HI, "name": None, "tool_calls": None}) == chat()


def test_defaults_are_those_of_the_interface():
    request = completion()
    assert (request.temperature, request.top_p, request.n, request.max_tokens) == (1.0, 1.0, 1, None)
    assert request.add_special_tokens
    assert not chat().add_special_tokens


def test_values_at_the_limits_pass():
    completion(top_p=1, min_p=0, n=128, seed=-(2**63), temperature=0, logit_bias={"49151": 100}, best_of=128)
    completion(response_format={"type": "text"}, stop=[], seed=2**64 - 1, top_k=-1)
    completion(stream=True, stream_options={"include_usage": None})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "h\ni"),
        ([], ""),
        ("", ""),
    ],
)
def test_s16_parts_become_one_text(content, text):
    for role in ("user", "system", "assistant"):
        assert chat({"role": role, "content": content}, HI).messages[0].content == text


def test_an_assistant_may_have_no_content_and_a_developer_is_the_system():
    request = chat({"role": "developer", "content": "d"}, {"role": "assistant", "content": None}, {**HI, "name": "n"})
    assert [message.for_template() for message in request.messages] == [
        {"role": "system", "content": "d"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "hi", "name": "n"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts_come_in_four_forms(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


def test_a_huge_logit_bias_is_read():
    assert len(completion(logit_bias={str(token_id): 1 for token_id in range(49_152)}).logit_bias) == 49_152


def test_max_completion_tokens_is_the_newer_name():
    assert chat(max_tokens=5, max_completion_tokens=7).asked_max_tokens == 7
    with pytest.raises(InvalidRequestError, match="max_completion_tokens"):
        chat(max_completion_tokens=0)


def test_a_message_is_continued_only_where_no_new_one_is_begun():
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        chat(continue_final_message=True)
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message


def test_alternatives_need_log_probabilities():
    with pytest.raises(InvalidRequestError, match="top_logprobs"):
        chat(top_logprobs=2)


def test_every_refusal_says_why():
    assert all(
        reason.strip() for model in (CompletionRequest, ChatCompletionRequest) for reason in model.refused.values()
    )
    assert set(GenerationRequest.refused) <= set(ChatCompletionRequest.refused)
