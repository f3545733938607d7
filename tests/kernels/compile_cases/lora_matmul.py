"""Adapters of rank 16 on Llama-3-8B's query, key and value projection, and of rank 256 on one of 4,096."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import lora_matmul
from tests.kernels.compile_cases.case import Case

TILE_TYPES = {
    "tokens_ptr": "*i32",
    "tile_adapters_ptr": "*i32",
    "shrunk_ptr": "*fp32",
    "num_tiles": "i32",
    "split_stride": "i32",
}


def cases() -> Iterator[Case]:
    for rank, slice_ends in ((16, (4096, 5120, 6144)), (256, (4096,))):
        num_ranks = rank * len(slice_ends)
        for shape in lora_matmul.SHAPES:
            split_size = lora_matmul._split_size(4096, shape.rows)
            yield Case(
                name=f"lora_matmul, shrink to {num_ranks}, tiles of {shape.rows}",
                kernel=lora_matmul._shrink_kernel,
                types={**TILE_TYPES, "rows_ptr": "*bf16", "lora_a_ptr": "*bf16", "row_stride": "i32"},
                constants={
                    **shape.constants(2),
                    "NUM_INPUTS": 4096,
                    "NUM_RANKS": num_ranks,
                    "SPLIT_SIZE": split_size,
                    "N": lora_matmul._num_columns(num_ranks),
                },
                options=shape.options,
            )
            yield Case(
                name=f"lora_matmul, expand from {num_ranks}, tiles of {shape.rows}",
                kernel=lora_matmul._expand_kernel,
                types={
                    **TILE_TYPES,
                    **dict.fromkeys(("lora_b_ptr", "output_ptr"), "*bf16"),
                    "scalings_ptr": "*fp32",
                    "output_stride": "i32",
                },
                constants={
                    **shape.constants(2),
                    "RANK": rank,
                    "SLICE_ENDS": slice_ends,
                    "NUM_SPLITS": 4096 // split_size,
                    "K": lora_matmul._num_columns(rank),
                },
                options=shape.options | {"num_stages": lora_matmul.EXPAND_STAGES},
            )
