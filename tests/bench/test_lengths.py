from __future__ import annotations

import random
import statistics

import pytest

from weir.bench.lengths import Lengths
from weir.core.errors import ConfigError


def draws(text: str, count: int = 2000) -> list[int]:
    rng = random.Random(0)
    lengths = Lengths.parse(text, name="input_tokens")
    return [lengths.draw(rng) for _ in range(count)]


@pytest.mark.parametrize("text", ["7", "3:9", "lognormal:128:0.8:1024"])
def test_what_is_read_is_written_the_same(text: str) -> None:
    assert str(Lengths.parse(text, name="n")) == text


def test_a_number_is_always_the_same() -> None:
    assert set(draws("7", 20)) == {7}


def test_a_range_has_both_ends() -> None:
    assert set(draws("3:6")) == {3, 4, 5, 6}


def test_a_long_tail_keeps_its_median_and_its_limits() -> None:
    drawn = draws("lognormal:100:1:400")
    assert statistics.median(drawn) == pytest.approx(100, rel=0.08)
    assert max(drawn) == 400
    assert min(drawn) >= 1
    share_above_e = sum(length > 100 * 2.71828 for length in drawn) / len(drawn)
    assert share_above_e == pytest.approx(0.159, abs=0.03)  # one sigma


TAILS = [
    f"lognormal{rest}" for rest in ("", ":0:1:9", ":9:0:9", ":10:1:9", ":9:nan:9", ":9:inf:9", ":9:11:9", ":9:1:9:9")
]


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "5:4", "0:4", "1:2:3", "1000001", *TAILS])
def test_what_is_no_length_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^input_tokens: .* is not a number of tokens.*1 to 1,000,000, SIGMA above 0 and up to 10"
    ):
        Lengths.parse(text, name="input_tokens")
