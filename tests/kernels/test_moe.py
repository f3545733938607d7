"""A mixture of experts, in plain torch and in Triton, against one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernels.gpu.moe import moe_triton
from kernels.moe import moe_reference
from tests.kernels.paged_pool import TOLERANCE, rms_ratio

MOE = pytest.mark.parametrize("moe", [moe_reference, moe_triton])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
Moe = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Random inputs of one layer, rows and logits being middle columns of wider ones that are NaN at both sides."""

    hidden: torch.Tensor
    logits: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def run(self, moe: Moe, residual: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
        return moe(self.hidden, self.logits, self.gate_up, self.down, residual, **settings)

    def plain(self, top_k: int, is_renormalised: bool) -> torch.Tensor:
        """Float64, one token and one of its experts after the other."""
        output = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for token, row in enumerate(self.hidden.double()):
            shares = self.logits[token].double().softmax(0)
            experts = sorted(range(len(shares)), key=lambda expert: (-float(self.logits[token, expert]), expert))[
                :top_k
            ]
            divisor = shares[experts].sum() if is_renormalised else 1.0
            for expert in experts:
                gate, up = (self.gate_up[expert].double() @ row).chunk(2)
                product = self.down[expert].double() @ (functional.silu(gate) * up)
                output[token] += shares[expert] / divisor * product
        return output


def guarded(rows: torch.Tensor) -> torch.Tensor:
    """The same rows between NaN."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 16), float("nan"), dtype=rows.dtype)
    wide[:, 8:-8] = rows
    return wide[:, 8:-8]


def make_layer(num_tokens: int, num_experts: int, hidden_size: int, size: int, dtype: torch.dtype) -> Layer:
    return Layer(
        hidden=guarded(torch.randn(num_tokens, hidden_size).to(dtype)),
        logits=guarded(torch.randn(num_tokens, num_experts).to(dtype)),
        gate_up=(torch.randn(num_experts, 2 * size, hidden_size) * hidden_size**-0.5).to(dtype),
        down=(torch.randn(num_experts, hidden_size, size) * size**-0.5).to(dtype),
    )


@MOE
@DTYPES
@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "size"),
    [(1, 8, 2, 64, 63), (7, 5, 3, 65, 7), (9, 1, 1, 130, 33), (3, 6, 6, 7, 40)],
)
def test_every_token_meets_its_experts(
    moe: Moe,
    dtype: torch.dtype,
    is_renormalised: bool,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    size: int,
) -> None:
    layer = make_layer(num_tokens, num_experts, hidden_size, size, dtype)
    output = layer.run(moe, top_k=top_k, is_renormalised=is_renormalised)
    assert (output.dtype, output.shape) == (dtype, layer.hidden.shape)
    assert rms_ratio(output, layer.plain(top_k, is_renormalised)) < TOLERANCE[dtype]


@MOE
@DTYPES
def test_a_residual_is_added_and_left_as_it_was(moe: Moe, dtype: torch.dtype) -> None:
    layer, residual = make_layer(5, 4, 48, 16, dtype), guarded(torch.randn(5, 48).to(dtype))
    before = residual.clone()
    output = layer.run(moe, residual, top_k=2, is_renormalised=True)
    assert rms_ratio(output, residual.double() + layer.plain(2, True)) < TOLERANCE[dtype]
    assert torch.equal(residual, before)


@MOE
def test_of_equal_scores_the_lower_expert_wins(moe: Moe) -> None:
    layer = make_layer(3, 6, 32, 16, torch.float32)
    layer.logits[0] = 0.0
    layer.logits[1] = torch.tensor([0.0, 2.0, -0.0, 2.0, 2.0, 0.0])
    layer.logits[2] = torch.tensor([-1.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    output = layer.run(moe, top_k=2, is_renormalised=True)
    assert rms_ratio(output, layer.plain(2, True)) < TOLERANCE[torch.float32]


@MOE
def test_experts_without_tokens_are_not_read(moe: Moe) -> None:
    layer = make_layer(6, 9, 40, 16, torch.float32)
    layer.logits[:, ::3] = -30.0
    expected = layer.plain(2, True)
    layer.gate_up[::3], layer.down[::3] = float("nan"), float("nan")
    assert rms_ratio(layer.run(moe, top_k=2, is_renormalised=True), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tile_rows", [None, 16, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_all_tokens_on_one_expert_fill_its_tiles(num_tokens: int, tile_rows: int | None) -> None:
    layer = make_layer(num_tokens, 3, 24, 8, torch.float32)
    layer.logits[:, 1] = 30.0
    output = layer.run(moe_triton, top_k=1, is_renormalised=True, tile_rows=tile_rows)
    assert rms_ratio(output, layer.plain(1, True)) < TOLERANCE[torch.float32]


@MOE
def test_no_tokens_are_nothing_to_route(moe: Moe) -> None:
    layer = make_layer(0, 4, 24, 8, torch.float32)
    assert layer.run(moe, top_k=2, is_renormalised=True).shape == (0, 24)


@MOE
def test_a_token_of_nan_spoils_no_other(moe: Moe) -> None:
    layer = make_layer(5, 4, 24, 16, torch.float32)
    expected = layer.plain(2, False)
    layer.hidden[1], layer.logits[1] = float("nan"), float("nan")
    output = layer.run(moe, top_k=2, is_renormalised=False)
    others = [0, 2, 3, 4]
    assert output[1].isnan().all()
    assert rms_ratio(output[others], expected[others]) < TOLERANCE[torch.float32]


def test_with_tiles_of_fixed_rows_a_token_is_the_same_bits_in_any_batch() -> None:
    layer = make_layer(20, 3, 40, 24, torch.float32)
    settings: dict[str, Any] = {"top_k": 2, "is_renormalised": True, "tile_rows": 16}
    together = layer.run(moe_triton, **settings)
    alone = moe_triton(layer.hidden[:1], layer.logits[:1], layer.gate_up, layer.down, **settings)
    assert torch.equal(alone[0], together[0])
