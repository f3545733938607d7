from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import rms_norm
from tests.kernels.paged_pool import TOLERANCE, rms_ratio


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(1, 7), (63, 65), (3, 5, 40), (0, 8)])
def test_equals_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = hidden.clone()

    normed = rms_norm(hidden, weight, 1e-6)

    exact = hidden.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert normed.dtype == dtype
    assert normed.shape == shape
    assert not normed.numel() or rms_ratio(normed, expected) < TOLERANCE[dtype]
    assert torch.equal(hidden, before)


def test_large_float16_rows_do_not_overflow() -> None:
    normed = rms_norm(torch.full((1, 64), 60000.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16), 1e-6)
    assert torch.equal(normed, torch.ones(1, 64, dtype=torch.float16))
