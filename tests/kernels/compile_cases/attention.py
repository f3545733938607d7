"""Attention."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import decode_attention, prefill_attention
from tests.kernels.compile_cases.case import Case, over_caches

ATTENTION_TYPES = {
    **dict.fromkeys(("query_ptr", "k_ptr", "v_ptr", "output_ptr"), "*bf16"),
    **dict.fromkeys(("tables_ptr", "seq_lens_ptr"), "*i32"),
    **dict.fromkeys(("query_row_stride", "query_head_stride", "block_stride", "kv_head_stride", "table_stride"), "i32"),
    **dict.fromkeys(("scale_log2", "soft_cap_log2"), "fp32"),
}
HEAD = {"HEAD_DIM": 128, "D": 128}


def cases() -> Iterator[Case]:
    for name, constants in {
        "one query": {"NUM_QUERIES": 1, "M": 16, "WINDOW": 0, "HAS_SOFT_CAP": False},
        "four queries, window, soft cap": {"NUM_QUERIES": 4, "M": 32, "WINDOW": 4096, "HAS_SOFT_CAP": True},
    }.items():
        splits = {"SPLIT_SIZE": 0, "MIN_TILES": decode_attention.MIN_SPLIT_TILES}
        yield from over_caches(
            Case(
                name=f"decode_attention, {name}",
                kernel=decode_attention._decode_attention_kernel,
                types={**ATTENTION_TYPES, "partial_ptr": "*fp32", "lse_ptr": "*fp32", "num_splits": "i32"},
                constants={
                    **constants,
                    **splits,
                    **HEAD,
                    "IS_SPLIT": True,
                    "GROUP": 8,
                    "BLOCK_SIZE": 16,
                    "N": decode_attention.TILE,
                },
                options=decode_attention.OPTIONS,
            )
        )
    yield Case(
        name="merge_splits",
        kernel=decode_attention._merge_splits_kernel,
        types={
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
            "seq_lens_ptr": "*i32",
            "output_ptr": "*bf16",
            "num_splits": "i32",
        },
        constants={
            **splits,
            **HEAD,
            "NUM_QUERIES": 1,
            "WINDOW": 0,
            "N": decode_attention.TILE,
            "S": decode_attention.MERGED_AT_ONCE,
        },
    )
    for name, constants in {
        "causal": {"WINDOW": 0, "HAS_SOFT_CAP": False},
        "window, soft cap": {"WINDOW": 4096, "HAS_SOFT_CAP": True},
    }.items():
        yield from over_caches(
            Case(
                name=f"prefill_attention, {name}",
                kernel=prefill_attention._prefill_attention_kernel,
                types={**ATTENTION_TYPES, "cu_seqlens_ptr": "*i32", "num_seqs": "i32"},
                constants={
                    **constants,
                    **HEAD,
                    "NUM_QUERIES": prefill_attention.ROWS // 4,
                    "GROUP": 4,
                    "BLOCK_SIZE": 16,
                    "M": prefill_attention.ROWS,
                    "N": prefill_attention.TILE,
                },
                options=prefill_attention.OPTIONS,
                amd_options=prefill_attention.AMD_OPTIONS,
            )
        )
