"""See `kernels.quantized_matmul`. A program takes a tile of outputs for a tile of rows over a part ("split") of the
inputs. Codes become numbers in the tile, without rounding; a scale is applied to the float32 sum of its group.

Weights stand on the left of the product: outputs are many and rows few, and the left operand of a tensor core may come
from registers, where it was decoded. How many rows there are decides the `Form` alone, and a form adds up the inputs in
one order, so that what a row gets does not depend on how many others there are: the number of splits is that which
fills the chip at the form's most rows.
Source: Lin et al. 2024, QServe, section 5; NVIDIA, CUTLASS, mixed-input GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import dot, rounded
from kernels.gpu.quantize_rows import quantize_rows_triton
from kernels.gpu.weight_codes import decoded, decoded_slices, nibble
from kernels.quantize_rows import E4m3Rows
from kernels.quantized_matrix import CodeFormat, QuantizedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How up to `max_rows` rows are multiplied.

    Attributes:
        rows, outputs: of a tile.
        options: of the launch.
    """

    max_rows: int
    rows: int
    outputs: int
    options: Mapping[str, int]


SMALL = Form(max_rows=16, rows=16, outputs=128, options={"num_warps": 4, "num_stages": 3})
LARGE = Form(max_rows=1024, rows=64, outputs=128, options={"num_warps": 8, "num_stages": 3})
FORMS = (SMALL, replace(LARGE, max_rows=64), replace(LARGE, max_rows=256), LARGE)
MAX_FUSED_ROWS = LARGE.max_rows
"""More rows are multiplied by torch after the matrix was dequantised. A weight then costs 4.5 bytes of memory traffic
(read at four bits, written and read at sixteen), by the data sheet of an H100 as long as 665 bf16 multiply-adds take. A
product here that reaches 60 % of the library's rate loses that much at 1,000 rows. Derived, not measured."""
MIN_E4M3_ROWS = SMALL.max_rows + 1
"""Fewer rows are bound by memory: rounding them would save nothing."""
MAX_SPLITS = 16
MIN_SPLIT_STEPS = 4
PIECE = 1024


@triton.jit
def _of_slice(value_ptrs, start, is_output, num_outputs, num_groups, GROUP: tl.constexpr):
    """What the group of the inputs from `start` on has for each output; the last group's beyond the last."""
    group = tl.minimum(start // GROUP, num_groups - 1) if GROUP > 0 else 0
    return tl.load(value_ptrs + group * num_outputs, mask=is_output, other=0.0)


@triton.jit
def _of_slices(
    value_ptrs,
    start,
    is_output,
    num_outputs,
    num_groups,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
):
    """The same for each of four slices of a step; those of one run of inputs are in one group."""
    first = _of_slice(value_ptrs, start, is_output, num_outputs, num_groups, GROUP)
    if RUN == STEP:
        return first, first, first, first
    third = _of_slice(value_ptrs, start + STEP // 2, is_output, num_outputs, num_groups, GROUP)
    if RUN == STEP // 2:
        return first, first, third, third
    second = _of_slice(value_ptrs, start + STEP // 4, is_output, num_outputs, num_groups, GROUP)
    fourth = _of_slice(value_ptrs, start + STEP // 4 * 3, is_output, num_outputs, num_groups, GROUP)
    return first, second, third, fourth


@triton.jit
def _rows_of_slice(row_ptrs, is_row, start, num_inputs, SLICE: tl.constexpr):
    """[SLICE, M], zeros beyond the last input."""
    inputs = start + tl.arange(0, SLICE)
    return tl.load(
        row_ptrs[None, :] + inputs[:, None], mask=(inputs < num_inputs)[:, None] & is_row[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_matmul_kernel(
    rows_ptr,
    row_scales_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    row_stride,
    step_stride,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PTX: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    split = tl.program_id(2)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    outputs = tl.program_id(1) * N + tl.arange(0, N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    row_ptrs = rows_ptr + rows.to(tl.int64) * row_stride
    row_scale_ptrs = row_scales_ptr + rows.to(tl.int64) * num_groups
    code_ptrs = codes_ptr + outputs[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    scale_ptrs, zero_ptrs = scales_ptr + outputs, zeros_ptr + outputs
    step_stride = step_stride.to(tl.int64)

    SLICES: tl.constexpr = 4 if FORMAT == "int4" else 1
    STEP: tl.constexpr = SLICES * SLICE
    RUN: tl.constexpr = STEP if GROUP % STEP == 0 else (2 * SLICE if GROUP % (2 * SLICE) == 0 else SLICE)
    num_steps = tl.cdiv(num_inputs, STEP)
    size = tl.cdiv(num_steps, tl.num_programs(2))
    first_step = split * size
    total = tl.zeros([N, M], tl.float32)
    eight = tl.full([N], 8, tl.uint8)
    # Scales and zeros are small: they are loaded a step ahead, where the compiler would wait for them.
    next_scales = _of_slices(scale_ptrs, first_step * STEP, is_output, num_outputs, num_groups, GROUP, RUN, STEP)
    next_zeros = (eight, eight, eight, eight)
    if HAS_ZEROS:
        next_zeros = _of_slices(zero_ptrs, first_step * STEP, is_output, num_outputs, num_groups, GROUP, RUN, STEP)
    for step in range(first_step, tl.minimum(first_step + size, num_steps)):
        start, scales, zeros = step * STEP, next_scales, next_zeros
        codes = tl.load(code_ptrs + step * step_stride, mask=is_output[:, None], other=0)
        next_scales = _of_slices(scale_ptrs, start + STEP, is_output, num_outputs, num_groups, GROUP, RUN, STEP)
        if HAS_ZEROS:
            next_zeros = _of_slices(zero_ptrs, start + STEP, is_output, num_outputs, num_groups, GROUP, RUN, STEP)
        if FORMAT == "int4":
            weights = decoded_slices(codes, zeros, HAS_PTX, row_ptrs.dtype.element_ty)
            for i in tl.static_range(SLICES):
                slice_rows = _rows_of_slice(row_ptrs, is_row, start + i * SLICE, num_inputs, SLICE)
                if GROUP == 0:
                    total += dot(weights[i], slice_rows)
                elif i * SLICE % RUN == 0:
                    product = dot(weights[i], slice_rows)
                else:
                    product += dot(weights[i], slice_rows)
                if GROUP > 0 and (i + 1) * SLICE % RUN == 0:
                    total += product * scales[i].to(tl.float32)[:, None]
        else:
            if HAS_ROW_SCALES:
                weight = codes.to(tl.float8e4nv, bitcast=True)
            else:
                weight = decoded(codes, FORMAT, HAS_PTX, row_ptrs.dtype.element_ty)
            product = dot(weight, _rows_of_slice(row_ptrs, is_row, start, num_inputs, SLICE))
            if GROUP > 0:
                product *= scales[0].to(tl.float32)[:, None]
                if HAS_ROW_SCALES:
                    product *= tl.load(row_scale_ptrs + start // GROUP, mask=is_row, other=0.0)[None, :]
            total += product
    total *= FACTOR
    if GROUP == 0:
        total *= next_scales[0].to(tl.float32)[:, None]
        if HAS_ROW_SCALES:
            total *= tl.load(row_scale_ptrs, mask=is_row, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    places = (split.to(tl.int64) * num_rows + rows) * num_outputs
    tl.store(
        output_ptr + places[None, :] + outputs[:, None],
        rounded(total, output_ptr.dtype.element_ty),
        mask=is_output[:, None] & is_row[None, :],
    )


@triton.jit
def _sum_splits_kernel(
    partial_ptr, bias_ptr, output_ptr, num_outputs, NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, D: tl.constexpr
):
    """A piece of a row: the splits' parts, first to last."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    outputs = tl.program_id(1) * D + tl.arange(0, D)
    is_output = outputs < num_outputs
    total = tl.zeros([D], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(partial_ptr + (split * num_rows + row) * num_outputs + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output_ptr + row * num_outputs + outputs, rounded(total, output_ptr.dtype.element_ty), mask=is_output)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    weight_ptr,
    num_outputs,
    num_inputs,
    num_groups,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    N: tl.constexpr,
):
    """One step of a tile of outputs, to [num_outputs, num_inputs]."""
    step = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * N + tl.arange(0, N)
    is_output = outputs < num_outputs
    inner = tl.arange(0, SLICE)
    codes = tl.load(
        codes_ptr + step * num_outputs * SLICE + outputs[:, None] * SLICE + inner[None, :],
        mask=is_output[:, None],
        other=0,
    )
    SLICES: tl.constexpr = 4 if FORMAT == "int4" else 1
    for i in tl.static_range(SLICES):
        start = (step * SLICES + i) * SLICE
        zeros = tl.full([N], 8, tl.uint8)
        if HAS_ZEROS:
            zeros = _of_slice(zeros_ptr + outputs, start, is_output, num_outputs, num_groups, GROUP)
        if FORMAT == "int4":
            exact = nibble(codes, zeros, 4 * i, tl.float32)
        else:
            exact = decoded(codes, FORMAT, False, tl.float32)
        scales = _of_slice(scales_ptr + outputs, start, is_output, num_outputs, num_groups, GROUP).to(tl.float32)
        inputs = start + inner
        tl.store(
            weight_ptr + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :],
            rounded(exact * (scales * FACTOR)[:, None], weight_ptr.dtype.element_ty),
            mask=is_output[:, None] & (inputs < num_inputs)[None, :],
        )


def dequantize_triton(weight: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """What `weight` stands for [num_outputs, num_inputs], columns in its `input_order`."""
    dense = torch.empty((weight.num_outputs, weight.num_inputs), dtype=dtype, device=weight.codes.device)
    tile = 64
    _dequantize_kernel[len(weight.codes), triton.cdiv(weight.num_outputs, tile)](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        dense,
        weight.num_outputs,
        weight.num_inputs,
        len(weight.scales),
        N=tile,
        **_constants(weight),
    )
    return dense


def quantized_matmul_triton(
    rows: torch.Tensor,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None = None,
    *,
    multiplies_e4m3: bool | None = None,
) -> torch.Tensor:
    """`rows` [num_rows, num_inputs], whose last dimension is contiguous; of float32 the matrix is always dequantised.

    Args:
        multiplies_e4m3: whether the chip does; None asks it.
    """
    assert rows.shape[1] == weight.num_inputs
    assert rows.stride(1) == 1
    assert weight.codes.is_contiguous()
    assert weight.scales.is_contiguous()
    assert weight.zeros is None or weight.zeros.is_contiguous()
    num_rows = len(rows)
    if weight.input_order is not None:
        rows = rows.index_select(1, weight.input_order)
    if multiplies_e4m3 is None:
        multiplies_e4m3 = _multiplies_e4m3(rows.device)
    if weight.quantizes_rows and multiplies_e4m3 and num_rows >= MIN_E4M3_ROWS:
        quantized = quantize_rows_triton(rows, weight.group_size)
        return _launch(_form(num_rows), quantized, weight, bias, rows.dtype)
    if num_rows > MAX_FUSED_ROWS or rows.dtype == torch.float32:
        return torch.nn.functional.linear(rows, dequantize_triton(weight, rows.dtype), bias)
    return _launch(_form(num_rows), rows, weight, bias, rows.dtype)


def _launch(
    form: Form,
    rows: torch.Tensor | E4m3Rows,
    weight: QuantizedMatrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    row_scales = rows.scales if isinstance(rows, E4m3Rows) else weight.scales
    factors = rows.codes if isinstance(rows, E4m3Rows) else rows
    num_rows, num_outputs = len(factors), weight.num_outputs
    output = torch.empty((num_rows, num_outputs), dtype=dtype, device=factors.device)
    if num_rows == 0:
        return output
    num_splits = _num_splits(form, weight)
    partial = output
    if num_splits > 1:
        partial = torch.empty((num_splits, num_rows, num_outputs), dtype=torch.float32, device=factors.device)
    constants = _constants(weight)
    if isinstance(rows, E4m3Rows):
        constants["FACTOR"] = 1.0
    anything = weight.scales
    grid = (triton.cdiv(num_rows, form.rows), triton.cdiv(num_outputs, form.outputs), num_splits)
    _quantized_matmul_kernel[grid](
        factors,
        row_scales,
        weight.codes,
        weight.scales,
        anything if weight.zeros is None else weight.zeros,
        anything if bias is None else bias,
        partial,
        num_rows,
        num_outputs,
        weight.num_inputs,
        len(weight.scales),
        factors.stride(0),
        weight.codes.stride(0),
        HAS_ROW_SCALES=isinstance(rows, E4m3Rows),
        HAS_BIAS=bias is not None and num_splits == 1,
        HAS_PTX=factors.is_cuda and torch.version.cuda is not None,
        M=form.rows,
        N=form.outputs,
        **constants,
        **form.options,
    )
    if num_splits > 1:
        _sum_splits_kernel[num_rows, triton.cdiv(num_outputs, PIECE)](
            partial,
            anything if bias is None else bias,
            output,
            num_outputs,
            NUM_SPLITS=num_splits,
            HAS_BIAS=bias is not None,
            D=PIECE,
        )
    return output


def _constants(weight: QuantizedMatrix) -> dict[str, object]:
    return {
        "FACTOR": 256.0 if weight.format is CodeFormat.E4M3 else 1.0,
        "GROUP": 0 if weight.group_size >= weight.num_inputs else weight.group_size,
        "FORMAT": str(weight.format),
        "SLICE": weight.codes.shape[2],
        "HAS_ZEROS": weight.zeros is not None,
    }


def _multiplies_e4m3(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def _form(num_rows: int) -> Form:
    return next((form for form in FORMS if num_rows <= form.max_rows), LARGE)


def _num_splits(form: Form, weight: QuantizedMatrix) -> int:
    """As many as fill the chip twice over at the form's most rows, each of some steps."""
    if weight.codes.is_cuda:
        num_processors: int = torch.cuda.get_device_properties(weight.codes.device).multi_processor_count
    else:
        num_processors = 1
    num_programs = -(-form.max_rows // form.rows) * -(-weight.num_outputs // form.outputs)
    return max(1, min(2 * num_processors // num_programs, len(weight.codes) // MIN_SPLIT_STEPS, MAX_SPLITS))
