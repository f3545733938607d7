"""The CPU's linear op against plain torch on what its packed matrix stands for."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu.packed_matrix import PackedMatrix, RowSource
from kernels.cpu.structs import Format, SourceFormat
from kernels.linear import linear_reference
from tests.kernels.cpu_library import SETS, library, run_linear

FLOATS = {Format.FLOAT32: torch.float32, Format.FLOAT16: torch.float16, Format.BFLOAT16: torch.bfloat16}
LARGEST = {Format.INT8: 32767, Format.INT4: 127}


def make_matrix(
    instruction_set: str, format: Format, num_outputs: int, num_inputs: int, is_gated: bool
) -> PackedMatrix:
    if format == Format.INT4:
        groups = torch.randint(0, 256, (num_outputs, num_inputs // 32, 20), dtype=torch.uint8)
        groups.view(torch.float16)[..., :2] = torch.randn(num_outputs, num_inputs // 32, 2).half() / 10
        source = RowSource(groups.flatten(1), SourceFormat.Q4_1, num_inputs)
    else:
        dtype = FLOATS.get(format, torch.float32)
        source = RowSource.of_floats(torch.randn(num_outputs, num_inputs).to(dtype))
    return PackedMatrix.pack(library(instruction_set), format, [source], is_gated=is_gated)


def rounded(rows: torch.Tensor, format: Format) -> torch.Tensor:
    """Rows as a matrix of integers sees them: each 32 values as integers times one scale."""
    if format not in LARGEST:
        return rows
    groups = rows.view(len(rows), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST[format]
    return ((groups / scale).round() * scale).view(rows.shape)


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("format", list(Format), ids=lambda each: each.name)
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 13, 65, 300])
def test_linear_equals_plain_torch(instruction_set: str, format: Format, num_rows: int, is_gated: bool) -> None:
    torch.manual_seed(num_rows)
    num_outputs, num_inputs = 84, 96
    matrix = make_matrix(instruction_set, format, num_outputs, num_inputs, is_gated)
    rows = torch.randn(num_rows, num_inputs)
    bias = torch.randn(num_outputs)
    residual = torch.randn(num_rows, num_outputs // (2 if is_gated else 1))

    output = run_linear(instruction_set, rows, matrix, bias, residual, is_gated=is_gated)

    doubles = [each.double() for each in (rounded(rows, format), matrix.unpacked(), bias, residual)]
    expected = linear_reference(*doubles, is_gated=is_gated)
    error = (output - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 1e-5


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("instruction_set", SETS[:1])
def test_blocks_of_gguf_files_stand_for_what_the_gguf_package_says(instruction_set: str, name: str) -> None:
    """A scale that is a product of two numbers, as in Q4_K, is rounded to a half float."""
    kind = gguf.GGMLQuantizationType[name]
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_inputs = 256
    raw = np.random.default_rng(0).integers(0, 256, (20, num_inputs // block_elements * block_bytes), dtype=np.uint8)
    scales = raw.reshape(20, -1, block_bytes)[..., : 4 if name in ("Q4_1", "Q4_K") else 2].copy()
    scales.view(np.float16)[:] = np.random.default_rng(1).normal(size=scales.view(np.float16).shape) / 50
    raw.reshape(20, -1, block_bytes)[..., : scales.shape[-1]] = scales
    source = RowSource(torch.from_numpy(raw), SourceFormat[name], num_inputs, is_quantized=True)
    format = Format.INT8 if name == "Q8_0" else Format.INT4

    matrix = PackedMatrix.pack(library(instruction_set), format, [source])

    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    assert matrix.unpacked().shape == expected.shape
    if name == "Q4_K":
        assert (matrix.unpacked() - expected).abs().max() < 1e-3 * expected.abs().max()
    else:
        assert (matrix.unpacked() - expected).abs().max() < 1e-6 * expected.abs().max()
