import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.choices import ChoiceAssembler, ChoiceDelta, ChoiceFormat
from tests.fakes import tiny_tokenizer
from tests.fakes.pipeline import logprobs_of
from weir.core.request import FinishReason, TokenDelta
from weir.text.stop_strings import StopStrings
from weir.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer.byte_level())
END = tiny_tokenizer.END_ID


def format_of(*stops: str, include: bool = False, **options) -> ChoiceFormat:
    found = StopStrings(stops, include_in_output=include) if stops else None
    return ChoiceFormat(
        tokenizer=TOKENIZER, stops=found, include_stop=include, eos_token_ids=frozenset([END]), **options
    )


def feed(
    assembler: ChoiceAssembler,
    ids: tuple[int, ...],
    *,
    step: int = 1,
    reason: FinishReason = FinishReason.LENGTH,
    stop_token_id: int | None = None,
) -> list[ChoiceDelta]:
    deltas = []
    for first in range(0, len(ids), step):
        some = ids[first : first + step]
        is_last = first + step >= len(ids)
        delta = TokenDelta(
            first_index=first,
            token_ids=some,
            logprobs=tuple(logprobs_of(token_id, 1) for token_id in some),
            finish_reason=reason if is_last else None,
            stop_token_id=stop_token_id if is_last else None,
        )
        deltas.append(assembler.push(delta))
    return deltas


def text_of(deltas: list[ChoiceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[ChoiceDelta]) -> tuple[int, ...]:
    return tuple(token.token_id for delta in deltas for token in delta.tokens)


@given(
    text=st.text("DEFGHI é中"),
    stops=st.lists(st.text("DEFG é", min_size=1, max_size=3), max_size=2),
    step=st.integers(1, 4),
    with_tokens=st.booleans(),
)
def test_grouping_of_tokens_changes_no_text_and_no_count(text, stops, step, with_tokens):
    ids = (*TOKENIZER.encode(text), END)
    results = []
    for size in (1, step, len(ids)):
        assembler = ChoiceAssembler(format_of(*stops, with_tokens=with_tokens))
        deltas = feed(assembler, ids, step=size, reason=FinishReason.STOP, stop_token_id=END)
        results.append(
            (text_of(deltas), ids_of(deltas), assembler.num_tokens, assembler.finish_reason, assembler.stop_reason)
        )
    assert results[0] == results[1] == results[2]


def test_a_stop_string_ends_the_choice_and_later_tokens_do_not_count():
    assembler = ChoiceAssembler(format_of("FGH", with_tokens=True))
    ids = TOKENIZER.encode("DEFGHLM")
    deltas = feed(assembler, ids, step=len(ids))
    assert text_of(deltas) == "DE"
    assert assembler.num_tokens == 2
    assert ids_of(deltas) == ids[:2]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason == "FGH"
    after = assembler.push(TokenDelta(first_index=len(ids), token_ids=(5,)))
    assert after.is_empty


def test_the_included_stop_string_is_the_end_of_the_text():
    assembler = ChoiceAssembler(format_of("FGH", include=True))
    assert text_of(feed(assembler, TOKENIZER.encode("DEFGHLM"))) == "DEFGH"


def test_the_end_of_sequence_token_counts_and_is_no_text():
    assembler = ChoiceAssembler(format_of(skip_special_tokens=False))
    deltas = feed(assembler, (*TOKENIZER.encode("Hello"), END), reason=FinishReason.STOP, stop_token_id=END)
    assert text_of(deltas) == "Hello"
    assert assembler.num_tokens == 2
    assert assembler.finish_reason == "stop"
    assert assembler.stop_reason is None


def test_a_stop_token_of_the_client_is_named_and_left_out_unless_wanted():
    stop_id = TOKENIZER.encode(" there")[0]
    ids = TOKENIZER.encode("Hello there")
    for include, text in ((False, "Hello"), (True, "Hello there")):
        assembler = ChoiceAssembler(format_of(include=include))
        deltas = feed(assembler, ids, reason=FinishReason.STOP, stop_token_id=stop_id)
        assert text_of(deltas) == text
        assert deltas[-1].stop_reason == stop_id


def test_a_stop_string_is_text_until_enough_tokens_were_made():
    assembler = ChoiceAssembler(format_of("E", min_tokens=4))
    deltas = feed(assembler, TOKENIZER.encode("DEF|DEF|DEF"))
    assert text_of(deltas) == "DEF|DEF|D"
    assert assembler.num_tokens == 5


def test_repeated_tokens_are_dropped():
    ids = TOKENIZER.encode("Hello there world")
    assembler = ChoiceAssembler(format_of(with_tokens=True))
    first = assembler.push(TokenDelta(first_index=0, token_ids=ids[:2]))
    again = assembler.push(TokenDelta(first_index=0, token_ids=ids[:1]))
    rest = assembler.push(TokenDelta(first_index=1, token_ids=ids[1:], finish_reason=FinishReason.LENGTH))
    assert first.text + rest.text == "Hello there world"
    assert again.is_empty
    assert assembler.num_tokens == 3


def test_a_gap_is_our_own_fault():
    with pytest.raises(AssertionError, match="lost"):
        ChoiceAssembler(format_of()).push(TokenDelta(first_index=1, token_ids=(5,)))


def test_a_character_cut_by_a_length_limit_is_left_out():
    begun = TOKENIZER.encode("é")[:1]
    assert text_of(feed(ChoiceAssembler(format_of()), (*TOKENIZER.encode("Hello"), *begun))) == "Hello"


def test_a_character_that_the_model_itself_left_open_is_replaced():
    ids = (*TOKENIZER.encode("é")[:1], END)
    assembler = ChoiceAssembler(format_of())
    assert text_of(feed(assembler, ids, reason=FinishReason.STOP, stop_token_id=END)) == "\ufffd"


def test_held_text_leaves_at_the_end():
    assert text_of(feed(ChoiceAssembler(format_of("DEFX")), TOKENIZER.encode("DEF"))) == "DEF"


def test_tokens_leave_with_their_text_and_offsets_count_characters():
    assembler = ChoiceAssembler(format_of("DEFGHX", with_tokens=True))
    deltas = feed(assembler, TOKENIZER.encode("DEFGHéLM"))
    assert [delta.text for delta in deltas] == ["", "", "", "DEFGHé", "LM"]
    assert [len(delta.tokens) for delta in deltas] == [0, 0, 0, 4, 1]
    assert [token.text_offset for delta in deltas for token in delta.tokens] == [0, 3, 5, 5, 6]
    assert all(token.logprobs.token_id == token.token_id for delta in deltas for token in delta.tokens)


def test_cached_tokens_are_those_of_the_first_worker():
    assembler = ChoiceAssembler(format_of())
    assembler.push(TokenDelta(first_index=0, token_ids=(5,), num_cached_tokens=16))
    assembler.push(TokenDelta(first_index=1, token_ids=(5,), num_cached_tokens=48))
    assert assembler.num_cached_tokens == 16
