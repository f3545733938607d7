"""Low-rank adapters, in plain torch and in Triton, against one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.gpu import lora_matmul as gpu
from kernels.gpu.lora_matmul import group_by_adapter, lora_matmul_triton
from kernels.lora_matmul import lora_matmul_reference
from tests.kernels.paged_pool import TOLERANCE, rms_ratio

LORA = pytest.mark.parametrize("lora_matmul", [lora_matmul_reference, lora_matmul_triton])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
LoraMatmul = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Random inputs; rows and output are middle columns of wider ones, NaN in the rows and 7 in the output."""

    rows: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    ids: torch.Tensor
    scalings: torch.Tensor
    slice_sizes: Sequence[int]
    wide_output: torch.Tensor

    @property
    def output(self) -> torch.Tensor:
        return self.wide_output[:, 8:-8]

    def run(self, lora_matmul: LoraMatmul, **settings: Any) -> torch.Tensor:
        """On a copy of the output; checks that nothing beside it changed."""
        wide = self.wide_output.clone()
        output = wide[:, 8:-8]
        args = (output, self.rows, self.lora_a, self.lora_b, self.ids, self.scalings, self.slice_sizes)
        assert lora_matmul(*args, **settings) is output
        assert (wide[:, :8] == 7).all()
        assert (wide[:, -8:] == 7).all()
        return output

    def plain(self) -> torch.Tensor:
        """Float64, one token and one slice after the other."""
        output, rank = self.output.double(), self.lora_b.shape[2]
        for token, adapter in enumerate(self.ids.tolist()):
            if adapter < 0:
                continue
            shrunk = self.lora_a[adapter].double() @ self.rows[token].double()
            first = 0
            for number, size in enumerate(self.slice_sizes):
                weight = self.lora_b[adapter, first : first + size].double()
                added = weight @ shrunk[number * rank : (number + 1) * rank]
                output[token, first : first + size] += self.scalings[adapter] * added
                first += size
        return output


def make_projection(
    ids: list[int],
    num_adapters: int,
    rank: int,
    num_inputs: int,
    slice_sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Projection:
    num_outputs = sum(slice_sizes)
    rows = torch.full((len(ids), num_inputs + 16), float("nan"), dtype=dtype)
    rows[:, 8:-8] = torch.randn(len(ids), num_inputs)
    output = torch.full((len(ids), num_outputs + 16), 7.0, dtype=dtype)
    output[:, 8:-8] = torch.randn(len(ids), num_outputs)
    lora_a = torch.randn(num_adapters, len(slice_sizes) * rank, num_inputs) * num_inputs**-0.5
    return Projection(
        rows=rows[:, 8:-8],
        lora_a=lora_a.to(dtype),
        lora_b=(torch.randn(num_adapters, num_outputs, rank) * rank**-0.5).to(dtype),
        ids=torch.tensor(ids, dtype=torch.int32),
        scalings=torch.rand(num_adapters) + 0.5,
        slice_sizes=slice_sizes,
        wide_output=output,
    )


@LORA
@DTYPES
@pytest.mark.parametrize(
    ("ids", "rank", "num_inputs", "slice_sizes"),
    [
        ([0], 8, 65, [7]),
        ([2, -1, 0, 2, -1, 2, 1], 8, 63, [65]),
        ([1, 1, -1, 0, 0], 16, 130, [40, 7, 63]),
        ([-1, 2, 2], 24, 40, [130, 65]),
        ([0, 1, -1], 96, 33, [33, 33]),
        ([1], 256, 17, [17]),
    ],
)
def test_every_token_gets_its_own_adapter(
    lora_matmul: LoraMatmul,
    dtype: torch.dtype,
    ids: list[int],
    rank: int,
    num_inputs: int,
    slice_sizes: list[int],
) -> None:
    projection = make_projection(ids, 3, rank, num_inputs, slice_sizes, dtype)
    output = projection.run(lora_matmul)
    without = projection.ids < 0
    assert rms_ratio(output, projection.plain()) < TOLERANCE[dtype]
    assert torch.equal(output[without], projection.output[without])


@LORA
def test_adapters_that_no_token_has_are_not_read(lora_matmul: LoraMatmul) -> None:
    projection = make_projection([3, -1, 1, 3], 5, 16, 40, [33])
    expected = projection.plain()
    for tensor in (projection.lora_a, projection.lora_b, projection.scalings):
        tensor[[0, 2, 4]] = float("nan")
    assert rms_ratio(projection.run(lora_matmul), expected) < TOLERANCE[torch.float32]


@LORA
def test_tokens_without_an_adapter_are_neither_read_nor_written(lora_matmul: LoraMatmul) -> None:
    projection = make_projection([-1, 0, -1, 0], 1, 16, 40, [33])
    expected = projection.plain()
    projection.rows[[0, 2]], projection.output[[0, 2]] = float("nan"), float("nan")
    output = projection.run(lora_matmul)
    assert output[[0, 2]].isnan().all()
    assert rms_ratio(output[[1, 3]], expected[[1, 3]]) < TOLERANCE[torch.float32]


@LORA
@pytest.mark.parametrize("ids", [[], [-1, -1, -1]])
def test_where_nobody_has_an_adapter_nothing_changes(lora_matmul: LoraMatmul, ids: list[int]) -> None:
    projection = make_projection(ids, 2, 8, 24, [16])
    assert torch.equal(projection.run(lora_matmul), projection.output)


@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(63, 40), (65, 3 * gpu.SPLIT_SIZE + 1)])
def test_many_tokens_of_one_adapter_fill_large_tiles(num_tokens: int, num_inputs: int) -> None:
    projection = make_projection([0] * num_tokens, 1, 16, num_inputs, [33])
    assert group_by_adapter(projection.ids, 1).tile_rows == 64
    assert rms_ratio(projection.run(lora_matmul_triton), projection.plain()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_inputs", [gpu.SPLIT_SIZE, gpu.SPLIT_SIZE + 1, gpu.SPLIT_SIZE * gpu.MAX_SPLITS[16] + 1])
def test_inputs_of_several_splits_are_added_up(num_inputs: int) -> None:
    projection = make_projection([0, -1, 1], 2, 8, num_inputs, [16])
    assert rms_ratio(projection.run(lora_matmul_triton), projection.plain()) < TOLERANCE[torch.float32]


def test_one_grouping_serves_several_projections() -> None:
    ids = [1, -1, 0, 1]
    for projection in (make_projection(ids, 2, 8, 40, [16]), make_projection(ids, 2, 16, 24, [40, 7])):
        output = projection.run(lora_matmul_triton, groups=group_by_adapter(projection.ids, 2))
        assert torch.equal(output, projection.run(lora_matmul_triton))
