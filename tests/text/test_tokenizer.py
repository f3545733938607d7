import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from tests.fakes import tiny_tokenizer
from weir.core.errors import InvalidRequestError, ModelLoadError
from weir.text.tokenizer import THREAD_CHARS, Tokenizer

SPECIAL_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer.byte_level())


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return Tokenizer(tiny_tokenizer.sentencepiece(), SPECIAL_CONFIG)


def test_special_tokens_are_read_from_text(byte_level):
    assert byte_level.encode("<|im_start|>user<|im_end|>")[0] == 1
    assert byte_level.encode("<|im_start|>user<|im_end|>")[-1] == 2


@given(text=st.text())
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level, text):
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == text.encode()


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), min_size=1))
def test_sentencepiece_bytes_hold_the_leading_space(text):
    tokenizer = Tokenizer(tiny_tokenizer.sentencepiece(adds_bos=False))
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == b" " + text.encode()
    assert tokenizer.decode(ids) == text


def test_bos_of_the_post_processor_is_found_and_added_once(sentencepiece):
    assert sentencepiece.add_bos_token
    assert sentencepiece.encode("Hello")[0] == 1
    assert sentencepiece.encode("Hello", add_special_tokens=False)[0] != 1
    spelled = sentencepiece.encode("<s>Hello")
    assert spelled[0] == 1
    assert spelled[1] != 1


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("rule", [True, False])
def test_configuration_overrules_the_post_processor(adds_bos, rule):
    tokenizer = Tokenizer(tiny_tokenizer.sentencepiece(adds_bos=adds_bos), {**SPECIAL_CONFIG, "add_bos_token": rule})
    assert tokenizer.add_bos_token is rule
    assert (tokenizer.encode("Hello")[0] == 1) is rule
    assert tokenizer.encode("<s>Hello").count(1) == 1


def test_empty_text_has_no_tokens_without_bos(byte_level, sentencepiece):
    assert byte_level.encode("") == ()
    assert sentencepiece.encode("") == (1,)


def test_special_token_names_are_strings_whatever_form_they_came_in(sentencepiece):
    assert sentencepiece.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert sentencepiece.special_token_ids == {0, 1, 2}


def test_a_part_of_a_character_is_shown_as_bytes(byte_level):
    assert byte_level.token_text(byte_level.encode("é")[0]) == "bytes:\\xc3"
    assert byte_level.token_text(byte_level.encode("中国")[0]) == "中国"


def test_unknown_ids_are_worth_nothing(byte_level):
    assert byte_level.token_bytes(byte_level.vocab_size + 7) == b""
    assert byte_level.token_text(10**9) == ""


def test_half_a_surrogate_pair_is_refused_by_position(byte_level):
    with pytest.raises(InvalidRequestError, match="character 1"):
        byte_level.encode("a\ud800")


async def test_long_text_gives_the_same_ids_in_a_thread(byte_level):
    text = "Hello world " * (THREAD_CHARS // 4)
    ids = await byte_level.encode_async(text)
    assert ids == byte_level.encode(text)
    assert await byte_level.decode_async(ids * 2) == text * 2
    assert len(ids * 2) > THREAD_CHARS


def test_no_token_spells_more_characters_than_the_bound(byte_level):
    text = "Hello there world 中国 DEF"
    assert len(text) <= len(byte_level.encode(text)) * byte_level.max_token_chars


def test_load_reads_both_files(tmp_path: Path):
    tiny_tokenizer.sentencepiece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**SPECIAL_CONFIG, "add_bos_token": False}))
    assert Tokenizer.load(tmp_path).encode("Hello")[0] != 1


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({}, "tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "["}, "tokenizer_config.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "tokenizer_config.json"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, files, name):
    for file, content in files.items():
        if content is None:
            tiny_tokenizer.byte_level().save(str(tmp_path / file))
        else:
            (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name():
    backend = HfTokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(ModelLoadError, match="none"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(backend)
