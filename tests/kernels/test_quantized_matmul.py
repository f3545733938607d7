"""Products with weights of four and eight bits: the packed matrix, the kernels in the interpreter, and their PTX."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.embedding import embedding
from kernels.gpu import weight_codes
from kernels.gpu.quantize_rows import quantize_rows_triton
from kernels.gpu.quantized_matmul import MAX_FUSED_ROWS, MIN_E4M3_ROWS, SMALL, quantized_matmul_triton
from kernels.linear import linear
from kernels.quantize_rows import E4M3, quantize_rows
from kernels.quantized_matmul import quantized_matmul_reference
from kernels.quantized_matrix import CodeFormat, QuantizedMatrix, QuantizedRows, can_stack
from tests.kernels import ptx
from tests.kernels.paged_pool import TOLERANCE, rms_ratio

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
INT4, INT8 = CodeFormat.INT4, CodeFormat.INT8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rows_of(
    format: CodeFormat, num_rows: int, num_inputs: int, group_size: int, *, has_zeros: bool = False
) -> QuantizedRows:
    """Every code may occur but e4m3's NaN."""
    num_groups = -(-num_inputs // group_size)
    if format is CodeFormat.E4M3:
        codes = torch.randn(num_rows, num_inputs).mul(60).to(E4M3).view(torch.uint8)
    else:
        codes = torch.randint(0, 16 if format is INT4 else 256, (num_rows, num_inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 17, (num_rows, num_groups), dtype=torch.uint8) if has_zeros else None
    scales = 0.5 + torch.rand(num_rows, num_groups)
    return QuantizedRows(codes=codes, scales=scales, format=format, group_size=group_size, zeros=zeros)


def guarded(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same matrix between scales of NaN."""
    scales = torch.full((len(matrix.scales) + 2, matrix.num_outputs), float("nan"))
    scales[1:-1] = matrix.scales
    return replace(matrix, scales=scales[1:-1])


def wide_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows between columns of NaN."""
    wide = torch.full((num_rows, num_inputs + 24), float("nan"), dtype=dtype)
    wide[:, 8:-16] = torch.randn(num_rows, num_inputs)
    return wide[:, 8:-16]


@pytest.mark.parametrize("format", CodeFormat)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "group_size"), [(1, 32, 32), (7, 200, 64), (3, 65, 65), (2, 300, 128)]
)
def test_a_packed_matrix_is_its_rows(format: CodeFormat, num_rows: int, num_inputs: int, group_size: int) -> None:
    has_zeros = format is INT4 and num_rows > 1
    parts = [rows_of(format, num_rows, num_inputs, group_size, has_zeros=has_zeros) for _ in range(2)]
    assert can_stack(parts)
    matrix = QuantizedMatrix.pack(parts, torch.float32)
    weight = torch.cat([part.dequantized() for part in parts])
    assert (matrix.num_outputs, matrix.num_inputs) == tuple(weight.shape)
    assert torch.equal(matrix.unpacked().dequantized(), weight)
    some = torch.tensor([2 * num_rows - 1, 0, 0])
    assert torch.equal(embedding(some, matrix), weight[some])


def test_parts_of_two_kinds_do_not_stack() -> None:
    first = rows_of(INT4, 4, 64, 32)
    order = torch.randperm(64)
    for other in (
        rows_of(INT8, 4, 64, 32),
        rows_of(INT4, 4, 64, 64),
        rows_of(INT4, 4, 64, 32, has_zeros=True),
        replace(first, scales=first.scales.half()),
        replace(first, input_order=order),
    ):
        assert not can_stack([first, other])
    assert can_stack([replace(first, input_order=order), replace(first, input_order=order.clone())])
    assert not can_stack([replace(first, input_order=order), replace(first, input_order=order.flip(0))])


@pytest.mark.parametrize(("format", "steps"), [(INT4, 1.0), (INT8, 0.5)])
def test_quantising_errs_by_no_more_than_a_step(format: CodeFormat, steps: float) -> None:
    weight = torch.randn(9, 100)
    weight[3] = 0
    weight[4, 32:64] = 0
    rows = QuantizedRows.of_floats(weight, format)
    step = rows.scales.float().abs().repeat_interleave(rows.group_size, 1)[:, :100]
    error = (rows.dequantized() - weight).abs()
    assert (error <= steps * 1.001 * step + 1e-7).all()
    largest = weight.abs() == weight.abs().amax(1, keepdim=True)
    assert (error[largest] <= 1e-3 * weight.abs()[largest]).all()


def test_quantising_to_e4m3_keeps_four_bits() -> None:
    weight = torch.randn(9, 100)
    error = (QuantizedRows.of_floats(weight, CodeFormat.E4M3).dequantized() - weight).abs()
    assert (error <= weight.abs() / 16 + 1e-4).all()


KINDS = {
    "int4, groups of 32": (INT4, 32, False),
    "int4, groups of 64 with zeros": (INT4, 64, True),
    "int4, groups of 96 with zeros": (INT4, 96, True),
    "int4, groups of 128 with zeros": (INT4, 128, True),
    "int4, rows with zeros": (INT4, 1 << 20, True),
    "int8, groups of 32": (INT8, 32, False),
    "int8": (INT8, 1 << 20, False),
    "e4m3, groups of 128": (CodeFormat.E4M3, 128, False),
    "e4m3": (CodeFormat.E4M3, 1 << 20, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_outputs", "num_inputs"),
    [
        (torch.float16, 1, 7, 63),
        (torch.float32, 7, 65, 130),
        (torch.bfloat16, 16, 129, 330),
        (torch.float16, 17, 65, 130),
        (torch.bfloat16, 65, 1, 65),
    ],
)
def test_the_kernel_is_its_reference(
    dtype: torch.dtype, kind: str, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    format, group_size, has_zeros = KINDS[kind]
    group_size = min(group_size, num_inputs)
    part = rows_of(format, num_outputs, num_inputs, group_size, has_zeros=has_zeros)
    matrix = guarded(QuantizedMatrix.pack([part], dtype))
    rows, bias = wide_rows(num_rows, num_inputs, dtype), torch.randn(num_outputs).to(dtype)
    product = quantized_matmul_triton(rows, matrix, bias)
    assert (product.dtype, product.shape) == (dtype, (num_rows, num_outputs))
    assert rms_ratio(product, quantized_matmul_reference(rows, matrix, bias)) < TOLERANCE[dtype]


def test_no_rows_have_no_product() -> None:
    matrix = QuantizedMatrix.pack([rows_of(INT4, 5, 64, 32)], torch.float16)
    assert quantized_matmul_triton(torch.empty(0, 64, dtype=torch.float16), matrix).shape == (0, 5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_splits_add_up(has_bias: bool) -> None:
    """Of one tile of outputs there are two splits even on one processor; the last has less to do."""
    matrix = guarded(QuantizedMatrix.pack([rows_of(INT4, 65, 1100, 128, has_zeros=True)], torch.bfloat16))
    rows = wide_rows(3, 1100, torch.bfloat16)
    bias = torch.randn(65).bfloat16() if has_bias else None
    product = quantized_matmul_triton(rows, matrix, bias)
    assert rms_ratio(product, quantized_matmul_reference(rows, matrix, bias)) < TOLERANCE[torch.bfloat16]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    matrix = QuantizedMatrix.pack([rows_of(INT4, 65, 1100, 32)], torch.float16)
    rows = torch.randn(SMALL.max_rows, 1100).half()
    crowd = quantized_matmul_triton(rows, matrix)
    assert torch.equal(quantized_matmul_triton(rows[5:6], matrix), crowd[5:6])
    assert torch.equal(quantized_matmul_triton(rows[3:10], matrix), crowd[3:10])


@pytest.mark.parametrize("format", CodeFormat)
def test_inputs_in_an_order_of_their_own(format: CodeFormat) -> None:
    weight, order = torch.randn(9, 96), torch.randperm(96)
    part = replace(QuantizedRows.of_floats(weight[:, order], format), input_order=order)
    matrix = QuantizedMatrix.pack([part], torch.float16)
    assert rms_ratio(part.dequantized(), weight) < 0.15
    rows = torch.randn(4, 96).half()
    expected = rows.float() @ part.dequantized().t()
    assert rms_ratio(quantized_matmul_triton(rows, matrix), expected) < TOLERANCE[torch.float16]
    assert rms_ratio(quantized_matmul_reference(rows, matrix), expected) < TOLERANCE[torch.float16]


@DTYPES
@pytest.mark.parametrize("format", CodeFormat)
def test_many_rows_meet_a_matrix_of_floats(dtype: torch.dtype, format: CodeFormat) -> None:
    group_size = 32 if format is INT4 else 72
    part = rows_of(format, 67, 72, group_size, has_zeros=format is INT4)
    matrix = guarded(QuantizedMatrix.pack([part], dtype))
    rows, bias = wide_rows(MAX_FUSED_ROWS + 1, 72, dtype), torch.randn(67).to(dtype)
    product = quantized_matmul_triton(rows, matrix, bias)
    assert rms_ratio(product, quantized_matmul_reference(rows, matrix, bias)) < TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize("group_size", [128, 300])
def test_rows_are_rounded_where_there_are_many(dtype: torch.dtype, group_size: int) -> None:
    part = rows_of(CodeFormat.E4M3, 65, 300, group_size)
    matrix = guarded(QuantizedMatrix.pack([part], dtype, quantizes_rows=True))
    for num_rows in (MIN_E4M3_ROWS - 1, MIN_E4M3_ROWS):
        rows = wide_rows(num_rows, 300, dtype)
        product = quantized_matmul_triton(rows, matrix, multiplies_e4m3=True)
        is_rounded = num_rows >= MIN_E4M3_ROWS
        expected = quantized_matmul_reference(rows, matrix, quantizes_rows=is_rounded)
        other = quantized_matmul_reference(rows, matrix, quantizes_rows=not is_rounded)
        assert rms_ratio(product, expected) < TOLERANCE[dtype]
        assert rms_ratio(other, expected) > 2 * TOLERANCE[dtype]


@DTYPES
@pytest.mark.parametrize(("size", "group_size"), [(7, 7), (63, 128), (300, 128), (3000, 3000), (2600, 128)])
def test_quantize_rows(dtype: torch.dtype, size: int, group_size: int) -> None:
    rows = wide_rows(5, size, dtype)
    rows[2] = 0
    rows[3, 0] = 30_000
    found, expected = quantize_rows_triton(rows, group_size), quantize_rows(rows, group_size)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes.float(), expected.codes.float())


def test_a_linear_layer_gates_and_adds() -> None:
    part = rows_of(INT4, 130, 64, 32)
    matrix, weight = QuantizedMatrix.pack([part], torch.float32), part.dequantized()
    rows, bias, residual = torch.randn(5, 64), torch.randn(130), torch.randn(5, 65)
    found = linear(rows, matrix, bias, residual, is_gated=True)
    torch.testing.assert_close(found, linear(rows, weight, bias, residual, is_gated=True), rtol=1e-4, atol=1e-3)


PTX = {
    torch.bfloat16: (weight_codes.BF16_INT4, 128, weight_codes.BF16_E4M3),
    torch.float16: (weight_codes.FP16_INT4, 1024, weight_codes.FP16_E4M3),
}


@pytest.mark.parametrize("dtype", list(PTX), ids=str)
def test_ptx_decodes_every_code_of_four_bits(dtype: torch.dtype) -> None:
    """All words of a pair at every zero, beside another word in the other half."""
    asm, base = PTX[dtype][0].value, PTX[dtype][1]
    words = torch.arange(1 << 16)
    registers = {"$4": words | (words ^ 0xFFFF) << 16}
    for zero in range(17):
        added = ptx.words_of(torch.full((len(words), 2), -base - zero, dtype=dtype))
        outputs = ptx.run(asm, registers | {f"${place}": added for place in range(5, 9)}, ["$0", "$1", "$2", "$3"])
        for index, output in enumerate(outputs):
            codes = torch.stack((words, words ^ 0xFFFF), 1) >> 4 * index & 15
            assert torch.equal(ptx.halves(output, dtype), (codes - zero).to(dtype))


@pytest.mark.parametrize("dtype", list(PTX), ids=str)
def test_ptx_decodes_every_code_of_e4m3(dtype: torch.dtype) -> None:
    """At every place of a word, but the two NaN."""
    codes = torch.arange(256)
    codes = codes[codes & 127 != 127]
    places = torch.stack([codes.roll(place) for place in range(4)], 1)
    register = places[:, 0] | places[:, 1] << 8 | places[:, 2] << 16 | places[:, 3] << 24
    outputs = ptx.run(PTX[dtype][2].value, {"$2": register}, ["$0", "$1"])
    found = torch.cat([ptx.halves(output, dtype) for output in outputs], 1)
    assert torch.equal(found.float(), places.to(torch.uint8).view(E4M3).float() / 256)
