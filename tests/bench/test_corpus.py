from __future__ import annotations

import random
from pathlib import Path

import pytest

from weir.bench.corpus import Corpus
from weir.core.errors import ConfigError

WORDS = [f"word{index}" for index in range(300)]


def test_pythons_own_help_is_always_there() -> None:
    text = Corpus.load(None).draw(random.Random(0), 400)
    assert len(text) > 400
    assert "\n" not in text


def test_a_draw_is_a_few_words_of_anywhere_and_then_the_text_from_one_place_on() -> None:
    corpus = Corpus(" ".join(WORDS), name="words")
    words = corpus.draw(random.Random(1), 100).split(" ")
    opening, rest = words[:6], words[6:-1]  # the last one may be cut
    assert set(opening) <= set(WORDS)
    start = WORDS.index(rest[0])
    assert rest == WORDS[start : start + len(rest)]


def test_a_text_is_read_in_a_circle() -> None:
    corpus = Corpus(" ".join(WORDS), name="words")
    words = corpus.draw(random.Random(1), 6000).split(" ")[6:]
    assert words.count("word0") >= 2
    assert words[words.index("word299") + 1] == "word0"


def test_too_few_words_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two three")
    with pytest.raises(ConfigError, match=r"^text_file: .*short\.txt has 3 different words; at least 256"):
        Corpus.load(tmp_path / "short.txt")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("bytes", "absent"):
        with pytest.raises(ConfigError, match=f"^text_file: .*{name} cannot be read"):
            Corpus.load(tmp_path / name)
