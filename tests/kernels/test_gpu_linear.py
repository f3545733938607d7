"""The product whose bits do not depend on the batch, against the plain one."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear import linear_triton
from kernels.linear import InvariantMatrix, linear, linear_reference
from tests.kernels.paged_pool import TOLERANCE, rms_ratio

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def padded(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Rows whose stride is wider than they are, with NaN between them."""
    whole = torch.full((shape[0], shape[1] + 5), float("nan"), dtype=dtype)
    whole[:, 1:-4] = torch.randn(shape).to(dtype)
    return whole[:, 1:-4]


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 7, 63), (7, 65, 130), (65, 200, 40), (0, 8, 8)]
)
@pytest.mark.parametrize("has_more", [False, True], ids=["", "bias and residual"])
def test_linear(dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, has_more: bool) -> None:
    rows, weight = padded((num_rows, num_inputs), dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_more else None
    residual = padded((num_rows, num_outputs), dtype) if has_more else None
    found = linear_triton(rows, weight, bias, residual)
    more = [None if tensor is None else tensor.double() for tensor in (bias, residual)]
    expected = linear_reference(rows.double(), weight.double(), *more)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert not found.numel() or rms_ratio(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_matrix_that_is_invariant_is_multiplied_so(is_gated: bool) -> None:
    rows, weight, bias = torch.randn(5, 40), torch.randn(32, 40), torch.randn(32)
    residual = torch.randn(5, 16 if is_gated else 32)
    found = linear(rows, InvariantMatrix(weight), bias, residual.clone(), is_gated=is_gated)
    expected = linear_reference(rows, weight, bias, residual, is_gated=is_gated)
    assert isinstance(found, torch.Tensor)
    assert rms_ratio(found, expected) < TOLERANCE[torch.float32]


def test_what_a_row_gets_does_not_depend_on_the_rows_beside_it() -> None:
    rows, weight = torch.randn(130, 100).half(), torch.randn(70, 100).half()
    together = linear_triton(rows, weight)
    for start, end in ((0, 1), (5, 12), (60, 130)):
        assert torch.equal(linear_triton(rows[start:end], weight), together[start:end])
