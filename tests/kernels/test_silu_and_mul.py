from __future__ import annotations

import pytest
import torch

from kernels.silu_and_mul import silu_and_mul
from tests.kernels.paged_pool import TOLERANCE, rms_ratio


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (7, 126), (65, 130)])
def test_the_first_half_gates_the_second(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_up = (2 * torch.randn(shape)).to(dtype)
    before = gate_up.clone()

    output = silu_and_mul(gate_up)

    gate, up = gate_up.double().chunk(2, dim=-1)
    assert output.dtype == dtype
    assert rms_ratio(output, gate / (1 + (-gate).exp()) * up) < TOLERANCE[dtype]
    assert torch.equal(gate_up, before)
