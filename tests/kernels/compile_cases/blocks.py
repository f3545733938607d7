"""Copies of whole blocks: 2 MiB each for Llama 3 8B in bfloat16, in words of 8 bytes."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.gpu import copy_blocks
from tests.kernels.compile_cases.case import Case


def cases() -> Iterator[Case]:
    words = {"source_ptr": "*i64", "target_ptr": "*i64"}
    sizes = {"NUM_WORDS": (2 << 20) // 8, "PIECE": copy_blocks.PIECE_BYTES // 8}
    for name, numbered in {
        "copy_blocks": ("sources_ptr", "targets_ptr"),
        "gather_blocks": ("sources_ptr",),
        "scatter_blocks": ("targets_ptr",),
    }.items():
        yield Case(
            name=name,
            kernel=copy_blocks._copy_rows_kernel,
            types={**words, **dict.fromkeys(numbered, "*i64")},
            constants={**sizes, **{each: None for each in ("sources_ptr", "targets_ptr") if each not in numbered}},
            options=copy_blocks.OPTIONS,
        )
