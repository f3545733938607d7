"""The rows of cases that the default model's own tokenizer and template decide."""

from itertools import pairwise
from pathlib import Path

import pytest

from gateway.choices import ChoiceAssembler, ChoiceFormat
from gateway.model_store import ServedModel
from tests.fakes.real_model import real_model_dir as real_model_dir
from weir.core.request import FinishReason, TokenDelta
from weir.text.detokenizer import Detokenizer
from weir.text.stop_strings import StopStrings

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(real_model_dir: Path) -> ServedModel:
    return ServedModel.load(real_model_dir)


def test_s15_prompts_have_exactly_the_expected_tokens_and_one_bos(model):
    rendered = model.chat_template.render(HI)
    assert len(model.tokenizer.encode(rendered, add_special_tokens=False)) == 31
    spelled = model.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(spelled) == 10
    assert all(pair != (1, 1) for pair in pairwise(spelled))


def test_s15_several_turns_are_the_turns_in_order(model):
    turns = [*HI, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "bye"}]
    ids = model.tokenizer.encode(model.chat_template.render(turns), add_special_tokens=False)
    assert ids.count(1) == 5  # the default system message, three turns, the answer's head
    assert ids.count(2) == 4


def test_characters_outside_the_vocabulary_are_dropped(model):
    assert model.tokenizer.encode("a\u0004b") == (*model.tokenizer.encode("a"), *model.tokenizer.encode("b"))
    assert model.tokenizer.encode("😀") == (10813, 242, 218)


def test_s05_characters_spread_over_tokens_leave_whole_and_at_once(model):
    ids = (216, 28589, 23022, 138, 30866, 137, 250, 46781)
    detokenizer = Detokenizer(model.tokenizer)
    assert [detokenizer.push_one(token_id) for token_id in ids] == [" ", "中", "", "国", " ", "", "鼠", "标"]


@pytest.mark.parametrize(
    ("stop", "text", "included"),
    [("FGH", "DE", "DEFGH"), ("EFG", "D", "DEFG"), ("M", "DEFGHIJKL", "DEFGHIJKLM"), ("DEFGHIJ", "", "DEFGHIJ")],
)
def test_s06_s07_stop_strings_are_found_inside_and_across_tokens(model, stop, text, included):
    spelled = ("DEF", "GH", "I", "J", "K", "LM", "N", "OP")
    ids = tuple(model.tokenizer.token_id(piece) for piece in spelled)
    assert None not in ids
    for include, expected in ((False, text), (True, included)):
        stops = StopStrings([stop], include_in_output=include)
        assembler = ChoiceAssembler(ChoiceFormat(tokenizer=model.tokenizer, stops=stops, include_stop=include))
        deltas = [assembler.push(TokenDelta(first_index=i, token_ids=(ids[i],))) for i in range(len(ids))]
        assert "".join(delta.text for delta in deltas) == expected
        assert assembler.finish_reason == FinishReason.STOP.value
