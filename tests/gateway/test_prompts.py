"""Rows S13, S14, S32 of cases: what the model's context and vocabulary decide. The tiny model's context is 256."""

from dataclasses import replace

import pytest

from gateway.http_settings import HttpSettings
from gateway.model_store import ModelStore, ServedModel
from gateway.openai_api import ChatCompletionRequest, CompletionRequest
from gateway.prompts import prepare_chat, prepare_completion
from gateway.request_body import check_fields
from gateway.sampling import sampling_params
from weir.core.errors import ContextLengthError, InvalidRequestError, UnsupportedFeatureError

SETTINGS = HttpSettings()
HI = {"role": "user", "content": "hi"}


async def prepared(model: ServedModel, settings: HttpSettings = SETTINGS, **fields):
    return await prepare_completion(check_fields({"prompt": "hi", **fields}, CompletionRequest), model, settings)


async def prepared_chat(model: ServedModel, *messages, settings: HttpSettings = SETTINGS, **fields):
    request = check_fields({"messages": list(messages or [HI]), **fields}, ChatCompletionRequest)
    return await prepare_chat(request, model, settings)


def sampled(model: ServedModel, settings: HttpSettings = SETTINGS, **fields):
    request = check_fields({"prompt": "hi", **fields}, CompletionRequest)
    return sampling_params(request, model, settings, max_tokens=request.max_tokens or 16)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(8, 248), (255, 1)])
async def test_s13_a_prompt_may_fill_the_context_with_its_output(model, num_prompt, max_tokens):
    (prompt,) = await prepared(model, prompt=[60] * num_prompt, max_tokens=max_tokens)
    assert (len(prompt.token_ids), prompt.max_tokens) == (num_prompt, max_tokens)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(8, 249), (256, 1), (257, 1), (256, None), (9000, None)])
async def test_s13_beyond_the_context_all_three_figures_are_told(model, num_prompt, max_tokens):
    with pytest.raises(ContextLengthError) as caught:
        await prepared(model, prompt=[60] * num_prompt, max_tokens=max_tokens)
    for figure in (256, num_prompt, max_tokens or 1):
        assert str(figure) in caught.value.message


async def test_s02_a_text_too_long_to_tokenize_is_refused_by_its_length(model):
    with pytest.raises(ContextLengthError, match="characters"):
        await prepared(model, prompt="the " * 100_000)
    with pytest.raises(ContextLengthError, match="characters"):
        await prepared_chat(model, {"role": "user", "content": "the " * 100_000})


async def test_the_default_limit_is_16_within_the_context_and_a_chat_may_fill_it(model):
    assert (await prepared(model))[0].max_tokens == 16
    assert (await prepared(model, prompt=[60] * 250))[0].max_tokens == 6
    chat = await prepared_chat(model)
    assert chat.max_tokens == 256 - len(chat.token_ids)


async def test_workers_that_take_less_than_the_model_limit_the_context(model):
    store = ModelStore([model], workers_limit={model.card.name: 100}.get)
    limited = store.get(None)
    assert (await prepared_chat(limited)).max_tokens == 100 - len((await prepared_chat(limited)).token_ids)
    with pytest.raises(ContextLengthError, match="context is 100 tokens"):
        await prepared(limited, prompt=[60] * 100)
    assert [each.max_model_len for each in store.models] == [100]
    assert ModelStore([model], workers_limit=lambda name: None).get(None).max_model_len == 256


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), ([""], "prompt"), (["a", ""], r"prompt\[1\]")])
async def test_s14_a_prompt_without_tokens_is_refused_by_place(model, prompt, param):
    with pytest.raises(InvalidRequestError, match=f"^{param}: has no tokens"):
        await prepared(model, prompt=prompt)


@pytest.mark.parametrize("prompt", [[-1], [60, 10**6], [[60], [10**20]]])
async def test_prompt_ids_outside_the_vocabulary_are_refused(model, prompt):
    with pytest.raises(InvalidRequestError, match="token id"):
        await prepared(model, prompt=prompt)


async def test_too_many_choices_are_refused_with_the_limit(model):
    with pytest.raises(InvalidRequestError, match=r"^n: 3 prompts with n 2 are 6 choices .* limit is 5"):
        await prepared(model, HttpSettings(max_choices=5), prompt=["a", "b", "c"], n=2)
    assert len(await prepared(model, HttpSettings(max_choices=6), prompt=["a", "b", "c"], n=2)) == 3


async def test_too_many_prompts_are_refused_with_the_limit(model):
    with pytest.raises(InvalidRequestError, match="limit is 2"):
        await prepared(model, HttpSettings(max_prompts=2), prompt=["a", "b", "c"])


@pytest.mark.parametrize(
    ("limit", "max_tokens", "kept"), [(3, 5, 3), (500, 5, 20), (-1, 5, 20), (-1, 250, 6), (1, None, 1)]
)
async def test_truncation_keeps_the_last_tokens(model, limit, max_tokens, kept):
    ids = list(range(60, 80))
    (prompt,) = await prepared(model, prompt=ids, truncate_prompt_tokens=limit, max_tokens=max_tokens)
    assert list(prompt.token_ids) == ids[-kept:]


async def test_truncation_brings_a_long_text_into_the_context(model):
    (prompt,) = await prepared(model, prompt="the " * 2000, truncate_prompt_tokens=-1, max_tokens=56)
    assert len(prompt.token_ids) == 200


async def test_an_echo_repeats_the_text_or_what_the_ids_spell(model):
    ids = model.tokenizer.encode("Hello<|im_end|>")
    assert (await prepared(model, prompt="Hello there", echo=True))[0].text == "Hello there"
    assert (await prepared(model, prompt=list(ids), echo=True))[0].text == "Hello<|im_end|>"
    assert (await prepared(model, prompt="Hello there"))[0].text == ""


async def test_a_chat_ends_where_the_answer_begins_or_goes_on(model):
    begin = await prepared_chat(model)
    assert model.tokenizer.decode(begin.token_ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    bare = await prepared_chat(model, add_generation_prompt=False)
    assert model.tokenizer.decode(bare.token_ids, skip_special_tokens=False).endswith("hi<|im_end|>\n")
    half = {"role": "assistant", "content": "Hello "}
    further = {"continue_final_message": True, "add_generation_prompt": False}
    goes_on = await prepared_chat(model, HI, half, echo=True, **further)
    assert model.tokenizer.decode(goes_on.token_ids, skip_special_tokens=False).endswith("assistant\nHello ")
    assert goes_on.text == "Hello "


async def test_a_template_from_a_request_needs_trust(model):
    with pytest.raises(UnsupportedFeatureError, match="--trust-request-chat-template"):
        await prepared_chat(model, chat_template="x")
    trusting = HttpSettings(trust_request_chat_template=True)
    fields = {"chat_template": "{{ word }}", "chat_template_kwargs": {"word": "Hello"}}
    prompt = await prepared_chat(model, settings=trusting, **fields)
    assert prompt.token_ids == model.tokenizer.encode("Hello")
    with pytest.raises(InvalidRequestError, match="chat_template"):
        await prepared_chat(model, settings=trusting, chat_template="{% if %}")
    with pytest.raises(InvalidRequestError, match="no tokens"):
        await prepared_chat(model, settings=trusting, chat_template="{# nothing #}")


async def test_a_model_without_a_template_chats_not(model):
    with pytest.raises(UnsupportedFeatureError, match="no chat template"):
        await prepared_chat(replace(model, chat_template=None))


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_in_every_field(model, field):
    limit = model.card.vocab_size
    assert getattr(sampled(model, **{field: [limit - 1]}), field) == (limit - 1,)
    for token_id in (limit, -1):
        with pytest.raises(InvalidRequestError, match=f"^{field}: token id {token_id} is outside 0 to {limit - 1}"):
            sampled(model, **{field: [token_id]})


def test_s32_biases_outside_the_vocabulary_are_refused(model):
    limit = model.card.vocab_size
    assert sampled(model, logit_bias={str(limit - 1): 100}).logit_bias == ((limit - 1, 100.0),)
    with pytest.raises(InvalidRequestError, match=f"logit_bias: token id {limit}"):
        sampled(model, logit_bias={str(limit): 5})


def test_a_missing_seed_is_drawn_and_a_given_one_is_kept(model):
    assert sampled(model).seed != sampled(model).seed
    assert sampled(model, seed=7).seed == 7
    assert sampled(model, seed=-1).seed == 2**64 - 1


def test_temperatures_too_small_to_divide_by_are_greedy(model):
    assert sampled(model, temperature=1e-300).temperature == 0.0
    assert sampled(model, temperature=0.01).temperature == 0.01
    assert sampled(model, top_k=-1).top_k == 0


def test_log_probabilities_are_limited_and_echo_asks_for_the_prompts(model):
    assert sampled(model).logprobs is None
    assert sampled(model, logprobs=0).logprobs == 0
    assert sampled(model, logprobs=3, echo=True).prompt_logprobs == 3
    assert sampled(model, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequestError, match=f"^{field}: must be at most 20, got 21"):
            sampled(model, **{field: 21})


def test_chat_log_probabilities_have_their_own_switch(model):
    def chat(**fields):
        request = check_fields({"messages": [HI], **fields}, ChatCompletionRequest)
        return sampling_params(request, model, SETTINGS, max_tokens=5)

    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    with pytest.raises(InvalidRequestError, match="top_logprobs"):
        chat(logprobs=True, top_logprobs=21)


def test_bad_words_are_banned_at_the_start_and_after_a_space(model):
    encode = model.tokenizer.encode
    for word in ("there", "9"):
        assert set(sampled(model, bad_words=[word]).bad_words_token_ids) == {encode(word), encode(" " + word)}


def test_min_tokens_must_fit_the_default_limit_too(model):
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        sampled(model, min_tokens=17)
