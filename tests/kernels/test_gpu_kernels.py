"""The Triton kernels that have a plain counterpart with the same arguments, against it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm_reference
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.gelu_and_mul import gelu_and_mul_reference
from kernels.gpu.gate_and_mul import gate_and_mul_triton
from kernels.gpu.rms_norm import rms_norm_triton
from kernels.gpu.rotary_embedding import rotary_embedding_triton
from kernels.gpu.rotate_and_store import rotate_and_store_triton
from kernels.rms_norm import rms_norm_reference
from kernels.rotary_embedding import rotary_embedding_reference
from kernels.rotate_and_store import rotate_and_store_reference
from kernels.silu_and_mul import silu_and_mul_reference
from tests.kernels.paged_pool import TOLERANCE, make_pool, rms_ratio

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (7, 65), (3, 5, 40), (0, 8)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    hidden, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = hidden.clone()
    normed = rms_norm_triton(hidden, weight, 1e-6)
    assert (normed.dtype, normed.shape) == (dtype, shape)
    assert not normed.numel() or rms_ratio(normed, rms_norm_reference(hidden, weight, 1e-6)) < TOLERANCE[dtype]
    assert torch.equal(hidden, before)


@DTYPES
def test_rms_norm_of_the_rows_that_indices_name(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(7, 80).to(dtype), torch.randn(40).to(dtype)
    hidden, indices = wide[:, 20:60], torch.tensor([6, 0, 0])
    normed = rms_norm_triton(hidden, weight, 1e-6, indices)
    assert rms_ratio(normed, rms_norm_reference(hidden[indices], weight, 1e-6)) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (3, 65), (0, 8)])
def test_rms_norm_of_a_sum_keeps_the_sum(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    whole = torch.full((shape[0] + 2, shape[1]), float("nan"), dtype=dtype)
    residual = whole[1:-1]
    residual.copy_(torch.randn(shape))
    before, expected_sum = rows.clone(), residual.clone()
    normed = rms_norm_triton(rows, weight, 1e-6, residual=residual)
    expected = add_rms_norm_reference(rows, expected_sum, weight, 1e-6)
    assert torch.equal(residual, expected_sum)
    assert not normed.numel() or rms_ratio(normed, expected) < TOLERANCE[dtype]
    assert torch.equal(rows, before)
    assert whole[[0, -1]].isnan().all()


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 40), (40, 16), (2, 2)])
def test_rotary_embedding(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    wide = torch.full((5, 7, head_dim + 3), float("nan"), dtype=dtype)
    heads = wide[:, 2:5, 1 : head_dim + 1]
    heads.copy_(torch.randn(5, 3, head_dim))
    expected, cos_sin = heads.clone(), torch.randn(5, rotary_dim)
    rotary_embedding_triton(heads, cos_sin)
    rotary_embedding_reference(expected, cos_sin)
    assert rms_ratio(heads, expected) < TOLERANCE[dtype]
    heads.fill_(float("nan"))
    assert wide.isnan().all()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (7, 126), (2, 3, 130), (3, 4098), (0, 8)])
@pytest.mark.parametrize(
    ("activation", "reference"),
    [
        ("silu", silu_and_mul_reference),
        ("gelu", gelu_and_mul_reference),
        ("gelu_tanh", partial(gelu_and_mul_reference, is_tanh=True)),
    ],
)
def test_gate_and_mul(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    activation: str,
    reference: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    gate_up = (3 * torch.randn(shape)).to(dtype)
    gated, expected = gate_and_mul_triton(gate_up, activation), reference(gate_up)
    assert (gated.dtype, gated.shape) == (dtype, expected.shape)
    assert not gated.numel() or rms_ratio(gated, expected) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(4, 2, 64, 64, 16), (5, 1, 40, 16, 1), (3, 3, 40, 40, 256)],
)
def test_rotate_and_store(
    dtype: torch.dtype,
    has_norms: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    num_tokens = 9
    rows = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    cos_sin, positions = torch.randn(50, rotary_dim), torch.randint(0, 50, (num_tokens,))
    num_blocks = -(-2 * num_tokens // block_size) + 1
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[[0, 5]] = -1  # rows of padding
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if has_norms else None
    found, expected = (make_pool(num_blocks, num_kv_heads, block_size, head_dim, dtype) for _ in range(2))

    turned = rotate_and_store_triton(rows.clone(), positions, slots, cos_sin, found.keys, found.values, norms, 1e-6)

    plain = rotate_and_store_reference(
        rows.clone(), positions, slots, cos_sin, expected.keys, expected.values, norms, 1e-6
    )
    assert rms_ratio(turned, plain) < TOLERANCE[dtype]
    assert rms_ratio(found.keys, expected.keys) < TOLERANCE[dtype]
    assert torch.equal(found.values, expected.values)
    assert found.poison_is_untouched()


@DTYPES
def test_rotate_and_store_in_float8_stores_what_the_reference_does(dtype: torch.dtype) -> None:
    rows = (50 * torch.randn(6, (4 + 2 * 2) * 40)).to(dtype)
    rows[3, 200], rows[3, 290] = 1e4, float("nan")
    cos_sin, positions, slots = torch.randn(50, 40), torch.arange(6), torch.tensor([5, 30, -1, 2, 0, 17])
    kv_scales = torch.tensor([[0.5, 3.0], [0.1, 1.0]])
    found, expected = (make_pool(2, 2, 16, 40, FLOAT8) for _ in range(2))

    rotate_and_store_triton(rows.clone(), positions, slots, cos_sin, found.keys, found.values, kv_scales=kv_scales)

    rotate_and_store_reference(
        rows.clone(), positions, slots, cos_sin, expected.keys, expected.values, kv_scales=kv_scales
    )
    assert rms_ratio(found.keys.float(), expected.keys.float()) < 4e-2  # a rounding may fall to the other side
    assert torch.equal(found.values.contiguous().view(torch.uint8), expected.values.contiguous().view(torch.uint8))
    assert found.poison_is_untouched()


def test_no_rows_are_nothing_to_rotate() -> None:
    pool = make_pool(1, 1, 4, 8)
    nothing = torch.empty(0, 3 * 8)
    indices = torch.empty(0, dtype=torch.int64)
    assert rotate_and_store_triton(nothing, indices, indices, torch.randn(4, 8), pool.keys, pool.values) is nothing
