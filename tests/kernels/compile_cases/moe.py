"""A mixture of 128 experts, eight a token, as Qwen3-30B-A3B has it."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import grouped_rows, moe
from tests.kernels.compile_cases.case import Case

SIZES = {"HIDDEN_SIZE": 2048, "SIZE": 768}
TILE_TYPES = {"pairs_ptr": "*i32", "tile_experts_ptr": "*i32", "num_tiles": "i32"}


def cases() -> Iterator[Case]:
    yield Case(
        name="moe, route",
        kernel=moe._route_kernel,
        types={"logits_ptr": "*bf16", "experts_ptr": "*i32", "weights_ptr": "*fp32", "row_stride": "i32"},
        constants={"NUM_EXPERTS": 128, "TOP_K": 8, "IS_RENORMALISED": True, "E": 128},
        options={"num_warps": 1},
    )
    yield Case(
        name="group_rows",
        kernel=grouped_rows._group_rows_kernel,
        types={
            **dict.fromkeys(("groups_ptr", "rows_ptr", "tile_groups_ptr"), "*i32"),
            **dict.fromkeys(("num_rows", "num_tiles"), "i32"),
        },
        constants={"NUM_GROUPS": 128, "TILE_ROWS": 16, "CHUNK": grouped_rows.CHUNK, "G": 128},
    )
    for shape in moe.SHAPES:
        yield Case(
            name=f"moe, gate_up, tiles of {shape.rows}",
            kernel=moe._gate_up_kernel,
            types={
                **TILE_TYPES,
                **dict.fromkeys(("hidden_ptr", "weight_ptr", "gated_ptr"), "*bf16"),
                "row_stride": "i32",
            },
            constants={**SIZES, **shape.constants(2), "TOP_K": 8},
            options=shape.options,
        )
        yield Case(
            name=f"moe, down, tiles of {shape.rows}",
            kernel=moe._down_kernel,
            types={**TILE_TYPES, **dict.fromkeys(("gated_ptr", "weight_ptr", "product_ptr"), "*bf16")},
            constants={**SIZES, **shape.constants(2)},
            options=shape.options,
        )
    yield Case(
        name="moe, combine",
        kernel=moe._combine_kernel,
        types={
            **dict.fromkeys(("product_ptr", "residual_ptr", "output_ptr"), "*bf16"),
            "weights_ptr": "*fp32",
            "residual_stride": "i32",
        },
        constants={"HIDDEN_SIZE": 2048, "TOP_K": 8, "HAS_RESIDUAL": True, "PIECE": moe.PIECE},
    )
