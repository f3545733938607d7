from __future__ import annotations

import cmath

import pytest
import torch

from kernels.rotary_embedding import rotary_embedding
from tests.kernels.paged_pool import TOLERANCE, rms_ratio


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 40), (40, 16), (2, 2)])
def test_pairs_turn_by_their_angles(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(0)
    half = rotary_dim // 2
    angles = 10 * torch.rand(5, half)
    wide = torch.randn(5, 7, head_dim).to(dtype)
    before = wide.clone()
    heads = wide[:, 1:4]

    rotary_embedding(heads, torch.cat((angles.cos(), angles.sin()), dim=-1))

    expected = before[:, 1:4].double()
    for token in range(5):
        for head in range(3):
            for pair in range(half):
                first, second = before[token, head + 1, pair].item(), before[token, head + 1, pair + half].item()
                turned = complex(first, second) * cmath.exp(1j * angles[token, pair].item())
                expected[token, head, pair], expected[token, head, pair + half] = turned.real, turned.imag
    assert rms_ratio(heads, expected) < TOLERANCE[dtype]
    assert torch.equal(heads[..., rotary_dim:], before[:, 1:4, rotary_dim:])
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, 4:], before[:, 4:])
