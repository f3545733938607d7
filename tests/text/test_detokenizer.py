import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import tiny_tokenizer
from weir.text.detokenizer import Detokenizer
from weir.text.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(tiny_tokenizer.byte_level())
SENTENCEPIECE = Tokenizer(tiny_tokenizer.sentencepiece(adds_bos=False))


def deltas(tokenizer: Tokenizer, ids: tuple[int, ...], **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push_one(token_id) for token_id in ids), detokenizer.flush()]


@given(text=st.text())
def test_joined_deltas_are_the_text(text):
    assert "".join(deltas(BYTE_LEVEL, BYTE_LEVEL.encode(text))) == text


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), min_size=1))
def test_sentencepiece_keeps_the_space_a_continuation_needs(text):
    assert "".join(deltas(SENTENCEPIECE, SENTENCEPIECE.encode(text))) == " " + text


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_no_delta_ends_inside_a_character(text):
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        assert all("\ufffd" not in delta for delta in deltas(tokenizer, tokenizer.encode(text)))


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)))
def test_any_ids_give_the_text_of_the_whole(ids):
    assert "".join(deltas(BYTE_LEVEL, tuple(ids))) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1)), cut=st.integers(0, 20))
def test_how_tokens_are_grouped_changes_nothing(ids, cut):
    detokenizer = Detokenizer(BYTE_LEVEL)
    grouped = detokenizer.push(ids[:cut]) + detokenizer.push(ids[cut:]) + detokenizer.flush()
    assert grouped == "".join(deltas(BYTE_LEVEL, tuple(ids)))


def test_a_completed_character_leaves_at_once():
    ids = BYTE_LEVEL.encode("😀a")
    assert len(ids) == 5
    assert deltas(BYTE_LEVEL, ids) == ["", "", "", "😀", "a", ""]


def test_a_byte_that_can_no_longer_become_a_character_is_replaced_at_once():
    start_of_two = BYTE_LEVEL.encode("é")[0]
    letter = BYTE_LEVEL.encode("x")[0]
    assert deltas(BYTE_LEVEL, (start_of_two, letter)) == ["", "\ufffdx", ""]


def test_flush_replaces_a_character_that_never_came():
    assert deltas(BYTE_LEVEL, BYTE_LEVEL.encode("é")[:1]) == ["", "\ufffd"]


@pytest.mark.parametrize(("skips", "text"), [(True, "Hello"), (False, "<|im_start|>Hello<|im_end|>")])
def test_special_tokens_are_left_out_unless_wanted(skips, text):
    ids = BYTE_LEVEL.encode("<|im_start|>Hello<|im_end|>")
    assert "".join(deltas(BYTE_LEVEL, ids, skip_special_tokens=skips)) == text


def test_a_special_token_inside_a_character_does_not_break_it():
    first, second = BYTE_LEVEL.encode("é")
    assert "".join(deltas(BYTE_LEVEL, (first, 2, second))) == "é"
