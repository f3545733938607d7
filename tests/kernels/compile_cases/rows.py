"""What is done to rows between the products."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import rms_norm, rotate_and_store, silu_and_mul
from tests.kernels.compile_cases.case import Case, over_caches


def cases() -> Iterator[Case]:
    yield Case(
        name="rms_norm",
        kernel=rms_norm._rms_norm_kernel,
        types={
            **dict.fromkeys(("hidden_ptr", "weight_ptr", "output_ptr"), "*bf16"),
            "indices_ptr": "*i64",
            "row_stride": "i32",
            "eps": "fp32",
        },
        constants={"SIZE": 4096, "HAS_INDICES": True, "D": 4096},
        options={"num_warps": 8},
    )
    yield Case(
        name="silu_and_mul",
        kernel=silu_and_mul._silu_and_mul_kernel,
        types={"gate_up_ptr": "*bf16", "output_ptr": "*bf16", "row_stride": "i32", "size": "i32"},
        constants={"PIECE": silu_and_mul.PIECE},
    )
    yield from over_caches(
        Case(
            name="rotate_and_store",
            kernel=rotate_and_store._rotate_and_store_kernel,
            types={
                **dict.fromkeys(("rows_ptr", "query_norm_ptr", "key_norm_ptr", "k_ptr", "v_ptr"), "*bf16"),
                **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
                **dict.fromkeys(("row_stride", "block_stride", "kv_head_stride"), "i32"),
                "cos_sin_ptr": "*fp32",
                "eps": "fp32",
            },
            constants={
                "HEAD_DIM": 128,
                "D": 128,
                "NUM_HEADS": 32,
                "NUM_KV_HEADS": 8,
                "ROTARY_DIM": 128,
                "BLOCK_SIZE": 16,
                "HAS_NORMS": True,
            },
            options={"num_warps": 1},
        )
    )
