import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.fakes.tiny_tokenizer import CHAT_TEMPLATE
from weir.core.errors import InvalidRequestError, ModelLoadError
from weir.text.chat_template import ChatTemplate, join_parts

HI = [{"role": "user", "content": "hi"}]


def test_messages_become_the_prompt_and_end_where_the_answer_begins():
    template = ChatTemplate(CHAT_TEMPLATE)
    assert template.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("content", ["Once", "Once  ", "", "a\ue000b"])
def test_the_last_message_is_continued_right_after_its_content(content):
    messages = [*HI, {"role": "assistant", "content": content}]
    text = ChatTemplate(CHAT_TEMPLATE).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" + content


def test_a_template_that_trims_is_continued_without_trailing_space():
    template = ChatTemplate("{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}")
    messages = [*HI, {"role": "assistant", "content": "Once  "}]
    assert template.render(messages, continue_final_message=True) == "[hi][Once"


def test_a_template_that_drops_the_last_message_cannot_continue_it():
    template = ChatTemplate("{{ messages[0]['content'] }}")
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        template.render([*HI, {"role": "assistant", "content": "x"}], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'a': '<&>', 'b': 'é'} | tojson }}", '{"a": "<&>", "b": "é"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{{ bos_token }}{{ thinking }}", "<s>on"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_templates_find_what_hugging_face_offers(source, text):
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"}, now=lambda: datetime(2026, 1, 2))
    assert template.render(HI, variables={"thinking": "on"}) == text


def test_variables_cannot_replace_the_messages():
    template = ChatTemplate("{{ messages[0]['content'] }}")
    assert template.render(HI, variables={"messages": [{"content": "other"}]}) == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('alternate the roles') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__ }}",
        "{% set x = messages.append(1) %}",
        "{{ missing.name }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_callers_fault(source):
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate(source).render(HI)


def test_the_templates_own_words_reach_the_caller():
    with pytest.raises(InvalidRequestError, match="alternate the roles"):
        ChatTemplate("{{ raise_exception('alternate the roles') }}").render(HI)


def test_a_broken_template_is_refused_with_its_line():
    with pytest.raises(InvalidRequestError, match="line 2"):
        ChatTemplate("x\n{% if %}")


def test_parts_are_joined_with_a_newline():
    assert join_parts(["h", "i"]) == "h\ni"
    assert join_parts([]) == ""


def test_load_prefers_the_template_file(tmp_path: Path):
    assert ChatTemplate.load(tmp_path, special_tokens={}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    loaded = ChatTemplate.load(tmp_path, special_tokens={})
    assert loaded is not None
    assert loaded.render(HI) == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    loaded = ChatTemplate.load(tmp_path, special_tokens={})
    assert loaded is not None
    assert loaded.render(HI) == "j"


def test_load_names_the_file_of_a_broken_template(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path, special_tokens={})
