from __future__ import annotations

import pytest
import torch

from kernels.linear import linear_onto, linear_reference
from tests.kernels.paged_pool import TOLERANCE, rms_ratio


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_a_product_onto_the_residual_is_the_sum_in_its_memory(
    dtype: torch.dtype, has_bias: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    rows, weight, residual = (torch.randn(shape).to(dtype) for shape in ((num_rows, 65), (33, 65), (num_rows, 33)))
    bias = torch.randn(33).to(dtype) if has_bias else None
    expected = linear_reference(rows, weight, bias, residual)
    found = linear_onto(rows, weight, bias, residual)
    assert found.data_ptr() == residual.data_ptr()
    assert not num_rows or rms_ratio(found, expected) < TOLERANCE[dtype]
