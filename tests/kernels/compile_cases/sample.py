"""Drawing tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernels.gpu import sample
from tests.kernels.compile_cases.case import Case

TYPES = {
    **dict.fromkeys(("draws_ptr", "lasts_ptr", "tokens_ptr"), "*i32"),
    **dict.fromkeys(("scores_ptr", "logits_ptr", "gathered_ptr", "floors_ptr", "log_normalizers_ptr"), "*fp32"),
    **dict.fromkeys(("bests_ptr", "leads_ptr", "logit_bests_ptr", "logit_sums_ptr"), "*fp32"),
    "token_ids_ptr": "*i64",
    **dict.fromkeys(("row_stride", "logits_stride", "vocab_size", "num_pieces"), "i32"),
}


def _case(name: str, kernel: Any, **fields: Any) -> Case:
    types = {argument: type for argument, type in TYPES.items() if argument in kernel.arg_names}
    return Case(name=name, kernel=kernel, types=types, **fields)


def cases() -> Iterator[Case]:
    """A vocabulary of 128,256 tokens, of which only the number of pieces is a constant."""
    yield _case(
        "sample, find_floor",
        sample._find_floor_kernel,
        constants={"NUM_GATHERED": sample.MAX_GATHERED, "N": sample.TILE},
        options=sample.FLOOR_OPTIONS,
    )
    yield _case(
        "sample, race",
        sample._race_kernel,
        constants={"IS_TRUNCATED": True, "HAS_LOGITS": True, "N": sample.PIECE // 4},
        options=sample.RACE_OPTIONS,
    )
    yield _case(
        "sample, finish",
        sample._finish_kernel,
        constants={"HAS_LOGITS": True, "P": 32},
        options={"num_warps": 1},
    )
