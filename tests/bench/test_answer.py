from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bench.answer import StreamedAnswer
from weir.bench.failure import DISCONNECT, EMPTY, PROTOCOL, STREAM_ERROR, ExchangeError

DONE = b"data: [DONE]\n\n"


def event(value: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    return b"data: " + json.dumps(value, separators=separators).encode() + b"\n\n"


def piece(text: str, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}], **fields}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def read(*parts: bytes) -> StreamedAnswer:
    """Each part comes a second after the one before it, the first at 1."""
    answer = StreamedAnswer()
    for now_s, part in enumerate(parts, start=1):
        answer.feed(part, float(now_s))
    return answer


def failure_of(*parts: bytes) -> tuple[str, str]:
    with pytest.raises(ExchangeError) as caught:
        read(*parts).end()
    return caught.value.failure.kind, caught.value.failure.message


def test_each_piece_of_text_has_the_time_at_which_it_came() -> None:
    answer = read(event(piece("a")), event(piece("b")) + event(piece("c")), event(piece("d", "length")), DONE)
    answer.end()
    assert answer.chunk_times_s == [1, 2, 2, 3]
    assert answer.ended_s == 4


def test_an_event_that_is_cut_in_two_came_with_its_end() -> None:
    whole = event(piece("a"))
    assert read(whole[:30], whole[30:]).chunk_times_s == [2]


def test_what_has_no_text_is_no_piece() -> None:
    answer = read(
        b": keep-alive\n\n",
        event(delta(role="assistant", content="")),
        event(delta(role="assistant", content=None)),
        event(piece("")),
        event({"choices": [], "usage": None}),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        event(delta(content="a")),
    )
    assert answer.chunk_times_s == [7]


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_chats_text_has_several_names(name: str, separators: tuple[str, str]) -> None:
    assert read(event(delta(**{name: "a"}), separators)).chunk_times_s == [1]


@given(
    text=st.text(),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
    is_chat=st.booleans(),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    usage=st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 2}]),
)
def test_the_short_way_sees_what_json_says(
    text: str,
    separators: tuple[str, str],
    is_chat: bool,
    finish_reason: str | None,
    usage: dict[str, int] | None,
) -> None:
    said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **said, "finish_reason": finish_reason}
    answer = read(event({"choices": [choice], "usage": usage}, separators))
    assert answer.chunk_times_s == ([1] if text else [])
    assert answer.usage == (usage or {})
    if finish_reason is None or not text:
        with pytest.raises(ExchangeError):
            answer.end()
    else:
        answer.end()


@pytest.mark.parametrize(
    "text", ['"error": "x"', '"finish_reason":"stop"', '"usage":{"completion_tokens":9}', '"text":"']
)
def test_json_inside_of_a_text_is_text(text: str) -> None:
    answer = read(event(piece(text)), event(piece("", "length")), DONE)
    answer.end()
    assert answer.chunk_times_s == [1]
    assert answer.usage == {}


def test_usage_is_the_servers_last_word() -> None:
    first, last = {"completion_tokens": 1}, {"completion_tokens": 7, "prompt_tokens": 3}
    answer = read(
        event(piece("a", usage=first)), event(piece("b", "length")), event({"choices": [], "usage": last}), DONE
    )
    assert answer.usage == last
    assert answer.chunk_times_s == [1, 2]


def test_lines_may_end_as_in_http() -> None:
    answer = read(event(piece("a", "stop")).replace(b"\n", b"\r\n"), b"data:[DONE]\r\n\r\n")
    answer.end()
    assert answer.ended_s == 2


def test_an_end_without_the_end_mark_counts_when_the_server_said_why_it_ended() -> None:
    answer = read(event(piece("a")), event(piece("", "stop")))
    answer.end()
    assert answer.ended_s == 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (event({"error": {"message": "the worker is gone", "hop": "decode"}}), "the worker is gone"),
        (event({"error": "gone"}), "gone"),
        (event({"object": "error", "message": "gone"}), "gone"),
        (b'error: {"code": 500}\n\n', '{"code": 500}'),
    ],
)
def test_a_failure_in_the_stream_is_the_servers_own_words(said: bytes, message: str) -> None:
    assert failure_of(event(piece("a")), said) == (STREAM_ERROR, message)


@pytest.mark.parametrize(
    "said", [b"data: {\n\n", b"data: 7\n\n", b'data: {"choices": 7}\n\n', b'data: {"choices": [7]}\n\n']
)
def test_what_is_no_event_is_said_to_be_none(said: bytes) -> None:
    assert failure_of(said)[0] == PROTOCOL


def test_a_stream_that_stops_is_a_disconnect() -> None:
    assert failure_of(event(piece("a"))) == (DISCONNECT, "the stream ended without [DONE]")


def test_an_answer_without_text_is_none() -> None:
    assert failure_of(event(piece("", "stop")), DONE)[0] == EMPTY
