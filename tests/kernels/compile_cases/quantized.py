"""Products with weights of four and eight bits: the gate and up projections of 4,096 inputs."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import quantize_rows, quantized_matmul
from kernels.quantize_rows import E4M3_MAX
from tests.kernels.compile_cases.case import Case

SIZES = ("num_outputs", "num_inputs", "num_groups")
WEIGHTS = {
    "int4, groups of 128 with zeros": {"FORMAT": "int4", "GROUP": 128, "SLICE": 32, "HAS_ZEROS": True, "FACTOR": 1.0},
    "int4, groups of 32": {"FORMAT": "int4", "GROUP": 32, "SLICE": 32, "HAS_ZEROS": False, "FACTOR": 1.0},
    "int8": {"FORMAT": "int8", "GROUP": 0, "SLICE": 128, "HAS_ZEROS": False, "FACTOR": 1.0},
    "e4m3, blocks": {"FORMAT": "e4m3", "GROUP": 128, "SLICE": 128, "HAS_ZEROS": False, "FACTOR": 256.0},
}
E4M3_ROWS = {
    "e4m3 by e4m3, blocks": {"GROUP": 128},
    "e4m3 by e4m3, rows": {"GROUP": 0},
}
CODES = {"int4": {"codes_ptr": "*i16"}}
NEEDS_E4M3 = frozenset({"sm_80", "gfx942"})


def cases() -> Iterator[Case]:
    types = {
        **dict.fromkeys(("rows_ptr", "bias_ptr"), "*bf16"),
        **dict.fromkeys(("codes_ptr", "zeros_ptr"), "*u8"),
        "scales_ptr": "*fp16",
        "row_scales_ptr": "*fp32",
        **dict.fromkeys(("num_rows", *SIZES, "row_stride", "step_stride"), "i32"),
    }
    e4m3_types = {**types, "rows_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    for form in (quantized_matmul.SMALL, quantized_matmul.LARGE):
        is_split = form == quantized_matmul.SMALL
        tile = {"M": form.rows, "N": form.outputs, "HAS_BIAS": not is_split, "HAS_PTX": True}
        output = {"output_ptr": "*fp32" if is_split else "*bf16"}
        for name, constants in WEIGHTS.items():
            yield Case(
                name=f"quantized_matmul, {name}, {form.rows} rows",
                kernel=quantized_matmul._quantized_matmul_kernel,
                types=types | output | CODES.get(str(constants["FORMAT"]), {}),
                aligned=frozenset(SIZES),
                constants={**constants, **tile, "HAS_ROW_SCALES": False},
                options=form.options,
                amd_constants={"HAS_PTX": False},
            )
        for name, constants in {} if is_split else E4M3_ROWS.items():
            yield Case(
                name=f"quantized_matmul, {name}, {form.rows} rows",
                kernel=quantized_matmul._quantized_matmul_kernel,
                types=e4m3_types | output,
                aligned=frozenset(SIZES),
                constants={
                    **WEIGHTS["e4m3, blocks"],
                    **constants,
                    **tile,
                    "HAS_ROW_SCALES": True,
                    "FACTOR": 1.0,
                },
                options=form.options,
                not_on=NEEDS_E4M3,
            )
    yield Case(
        name="sum_splits",
        kernel=quantized_matmul._sum_splits_kernel,
        types={"partial_ptr": "*fp32", "bias_ptr": "*bf16", "output_ptr": "*bf16", "num_outputs": "i32"},
        aligned=frozenset({"num_outputs"}),
        constants={"NUM_SPLITS": 8, "HAS_BIAS": True, "D": quantized_matmul.PIECE},
    )
    for name in ("int4, groups of 128 with zeros", "e4m3, blocks"):
        yield Case(
            name=f"dequantize, {name}",
            kernel=quantized_matmul._dequantize_kernel,
            types={
                **{pointer: types[pointer] for pointer in ("codes_ptr", "scales_ptr", "zeros_ptr")},
                "weight_ptr": "*bf16",
                **dict.fromkeys(SIZES, "i32"),
                **CODES.get(str(WEIGHTS[name]["FORMAT"]), {}),
            },
            aligned=frozenset(SIZES),
            constants={**WEIGHTS[name], "N": 64},
        )
    yield Case(
        name="quantize_rows",
        kernel=quantize_rows._quantize_rows_kernel,
        types={
            "rows_ptr": "*bf16",
            "codes_ptr": "*fp8e4nv",
            "scales_ptr": "*fp32",
            **dict.fromkeys(("row_stride", "size", "num_groups"), "i32"),
        },
        aligned=frozenset({"size"}),
        constants={"LARGEST": E4M3_MAX, "GROUP": 128, "G": 16, "D": 128},
        options={"num_warps": 4},
        not_on=NEEDS_E4M3,
    )
