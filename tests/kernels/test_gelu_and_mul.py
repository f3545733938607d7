from __future__ import annotations

import math

import pytest
import torch

from kernels.gelu_and_mul import gelu_and_mul
from tests.kernels.paged_pool import TOLERANCE, rms_ratio


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("is_tanh", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (7, 126), (65, 130)])
def test_the_first_half_gates_the_second(dtype: torch.dtype, is_tanh: bool, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_up = (2 * torch.randn(shape)).to(dtype)
    before = gate_up.clone()

    output = gelu_and_mul(gate_up, is_tanh=is_tanh)

    gate, up = gate_up.double().chunk(2, dim=-1)
    if is_tanh:
        share = 1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        share = 1 + torch.erf(gate / math.sqrt(2))
    assert output.dtype == dtype
    assert rms_ratio(output, gate * share / 2 * up) < TOLERANCE[dtype]
    assert torch.equal(gate_up, before)
