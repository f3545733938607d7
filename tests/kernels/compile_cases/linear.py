"""Products that are the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import linear
from tests.kernels.compile_cases.case import Case


def cases() -> Iterator[Case]:
    yield Case(
        name="linear",
        kernel=linear._linear_kernel,
        types={
            **dict.fromkeys(("rows_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "output_ptr"), "*bf16"),
            **dict.fromkeys(("num_rows", "num_outputs", "num_inputs", "row_stride", "residual_stride"), "i32"),
        },
        constants={
            "HAS_BIAS": True,
            "HAS_RESIDUAL": True,
            "M": linear.M,
            "N": linear.N,
            "K": linear.K,
            "GROUP": linear.GROUP,
        },
        aligned=frozenset(("num_outputs", "num_inputs")),
        options=linear.OPTIONS,
        amd_options=linear.AMD_OPTIONS,
    )
