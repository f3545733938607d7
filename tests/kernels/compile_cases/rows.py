"""What is done to rows between the products."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import gate_and_mul, rms_norm, rotary_embedding, rotate_and_store
from tests.kernels.compile_cases.case import Case, over_caches


def cases() -> Iterator[Case]:
    normed = {
        **dict.fromkeys(("hidden_ptr", "weight_ptr", "output_ptr"), "*bf16"),
        "row_stride": "i32",
        "eps": "fp32",
    }
    for name, more, absent in (
        ("rms_norm", {"indices_ptr": "*i64"}, "residual_ptr"),
        ("add_rms_norm", {"residual_ptr": "*bf16"}, "indices_ptr"),
    ):
        yield Case(
            name=name,
            kernel=rms_norm._rms_norm_kernel,
            types={**normed, **more},
            constants={"SIZE": 4096, "D": 4096, absent: None},
            options={"num_warps": 8},
        )
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield Case(
            name=f"gate_and_mul, {activation}",
            kernel=gate_and_mul._gate_and_mul_kernel,
            types={"gate_up_ptr": "*bf16", "output_ptr": "*bf16", "row_stride": "i32", "size": "i32"},
            constants={"ACTIVATION": activation, "PIECE": gate_and_mul.PIECE},
        )
    yield Case(
        name="rotary_embedding",
        kernel=rotary_embedding._rotary_embedding_kernel,
        types={"heads_ptr": "*bf16", "cos_sin_ptr": "*fp32", "token_stride": "i32", "head_stride": "i32"},
        constants={"HALF": 64, "P": 64},
        options={"num_warps": 1},
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
