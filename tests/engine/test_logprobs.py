"""Log-probabilities against a plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weir.engine.logprobs import ROWS_AT_ONCE, launch_logprobs


@given(
    values=st.lists(st.integers(-12, 12), min_size=7, max_size=7),
    token_id=st.integers(0, 6),
    num_top=st.sampled_from([0, 1, 3, 7, 20, -1]),
)
def test_equals_the_reference(values: list[int], token_id: int, num_top: int) -> None:
    (found,) = launch_logprobs(torch.tensor([values], dtype=torch.float32) / 2, [token_id], [num_top]).collect()
    normalizer = math.log(sum(math.exp(value / 2) for value in values))
    order = sorted(range(7), key=lambda index: (-values[index], index))
    top = order[: 7 if num_top < 0 else num_top]
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(values[token_id] / 2 - normalizer)
    assert found.rank == order.index(token_id) + 1
    assert found.top_token_ids == tuple(top)
    assert found.top_logprobs == pytest.approx([values[index] / 2 - normalizer for index in top])


def test_rows_want_different_numbers_and_neighbours_change_nothing() -> None:
    logits = torch.randn(2 * ROWS_AT_ONCE + 5, 101, generator=torch.Generator().manual_seed(0))
    wanted = [(0, 4, -1)[index % 3] for index in range(len(logits))]
    together = launch_logprobs(logits, list(range(len(logits))), wanted).collect()
    alone = [launch_logprobs(logits[i : i + 1], [i], [wanted[i]]).collect()[0] for i in range(len(logits))]
    assert together == tuple(alone)
    assert [len(item.top_token_ids) for item in together[:3]] == [0, 4, 101]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(FloatingPointError):
        launch_logprobs(torch.tensor([[0.0, value]]), [0], [0]).collect()


def test_no_rows() -> None:
    assert launch_logprobs(torch.zeros((0, 5)), [], []).collect() == ()
