import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.text.stop_strings import StopStrings

SMALL = st.text("ab", min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include_in_output=include).matcher()
    text = ""
    for piece in pieces:
        match = matcher.push(piece)
        text += match.text
        if match.stop is not None:
            return text, match.stop
    return text + matcher.flush(), None


def first_stop(stops: list[str], text: str) -> tuple[int, str] | None:
    """The definition: the stop that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@given(
    stops=st.lists(SMALL, min_size=1, max_size=4), pieces=st.lists(st.text("abc", max_size=3)), include=st.booleans()
)
def test_result_is_the_definition_however_the_text_is_cut(stops, pieces, include):
    text = "".join(pieces)
    found = first_stop(stops, text)
    if found is None:
        assert run(stops, pieces, include=include) == (text, None)
    else:
        end, stop = found
        kept = text[:end] if include else text[: end - len(stop)]
        assert run(stops, pieces, include=include) == (kept, stop)


@given(stops=st.lists(SMALL, min_size=1, max_size=4), text=st.text("abc"))
def test_only_what_may_become_a_stop_is_held_back(stops, text):
    matcher = StopStrings(stops).matcher()
    sent = ""
    for position, char in enumerate(text, start=1):
        match = matcher.push(char)
        if match.stop is not None:
            break
        sent += match.text
        seen = text[:position]
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len)
        assert sent == seen[: len(seen) - len(longest)]


@pytest.mark.parametrize(
    ("stop", "kept", "included"),
    [("FGH", "DE", "DEFGH"), ("EFG", "D", "DEFG"), ("M", "DEFGHIJKL", "DEFGHIJKLM"), ("DEFGHIJ", "", "DEFGHIJ")],
)
def test_stop_strings_need_no_token_boundary(stop, kept, included):
    tokens = ["DEF", "GH", "I", "J", "K", "LM", "N"]
    assert run([stop], tokens) == (kept, stop)
    assert run([stop], tokens, include=True) == (included, stop)


def test_nothing_of_a_stop_string_leaves_before_it_is_complete():
    matcher = StopStrings(["DEFGHIJ"]).matcher()
    assert [matcher.push(token).text for token in ("DEF", "GH", "I")] == ["", "", ""]


def test_nothing_is_held_back_when_the_stop_string_is_wanted_in_the_text():
    assert StopStrings(["DEFGH"], include_in_output=True).matcher().push("DEF").text == "DEF"


def test_a_stop_that_may_not_stop_yet_is_text():
    matcher = StopStrings(["ab"]).matcher()
    assert matcher.push("xab", may_stop=False).text == "xab"
    match = matcher.push("cab")
    assert (match.text, match.stop) == ("c", "ab")


def test_a_stop_begun_before_it_may_stop_is_still_found_and_cut():
    matcher = StopStrings(["abc"]).matcher()
    assert matcher.push("xab", may_stop=False).text == "x"
    assert matcher.push("c").text == ""


def test_no_stop_strings_is_false():
    assert not StopStrings([])
    assert StopStrings(["a"])
