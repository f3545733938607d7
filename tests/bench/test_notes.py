from __future__ import annotations

from typing import Any

import pytest

from tests.bench.records import record
from weir.bench.notes import notes_on
from weir.bench.record import RequestRecord
from weir.bench.workload import PRESETS


def notes(*records: RequestRecord, name: str = "w1", ignore_eos: bool = True) -> list[str]:
    return list(notes_on(records, PRESETS[name], None, ignore_eos=ignore_eos))


def test_all_as_asked_is_no_note() -> None:
    assert notes(record(), record()) == []


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"input_tokens": 11}, "in 1 of 2 requests the server counts other prompt tokens than were made: +1"),
        ({"output_tokens": 3}, "1 of 2 answers are shorter than asked for, 3.0 tokens on average"),
        ({"is_counted_by_server": False}, "the server gives no usage: output tokens are the pieces of text that came"),
        ({"itl_s": (1.0,)}, "1.43 tokens came in a piece of text, on average: a gap (ITL) is one between pieces"),
        (
            {"cached_tokens": 16},
            "1 of 2 prompts had more in the server's prefix cache than the 0 tokens that they share",
        ),
        ({"due_s": 0.5, "sent_s": 0.7}, "this client fell behind: a request was sent 200 ms after it was due"),
    ],
)
def test_what_is_not_as_asked_is_a_sentence(fields: dict[str, Any], note: str) -> None:
    assert notes(record(), record(**fields)) == [note]


def test_different_counts_are_a_range() -> None:
    (note,) = notes(record(input_tokens=9), record(input_tokens=14), record())
    assert note.endswith("in 2 of 3 requests the server counts other prompt tokens than were made: -1 to +4")


def test_what_is_meant_to_be_cached_is_no_note() -> None:
    assert notes(record(cached_tokens=512), name="w4") == []
    assert len(notes(record(cached_tokens=528), name="w4")) == 1
    chat = record(input_tokens=40, cached_tokens=16)  # the template, which is the same before every prompt
    assert [note for note in notes(chat) if "cache" in note] == []


def test_short_answers_are_no_note_where_they_are_allowed_to_be() -> None:
    assert notes(record(output_tokens=5, asked_output_tokens=9), ignore_eos=False) == []


def test_failed_requests_say_nothing_here() -> None:
    assert notes(record(failed="timeout", output_tokens=0, input_tokens=99)) == []
