"""Drawing tokens, and verifying drafts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kernels.gpu import rejection_sample, sample
from tests.kernels.compile_cases.case import Case

TYPES = {
    **dict.fromkeys(("draws_ptr", "lasts_ptr", "tokens_ptr"), "*i32"),
    **dict.fromkeys(("scores_ptr", "logits_ptr", "gathered_ptr", "floors_ptr", "log_normalizers_ptr"), "*fp32"),
    **dict.fromkeys(("bests_ptr", "leads_ptr", "logit_bests_ptr", "logit_sums_ptr"), "*fp32"),
    **dict.fromkeys(("draft_probs_ptr", "sums_ptr", "normalizers_ptr"), "*fp32"),
    **dict.fromkeys(("token_ids_ptr", "drafts_ptr", "num_accepted_ptr"), "*i64"),
    **dict.fromkeys(("row_stride", "logits_stride", "vocab_size", "num_drafts", "num_pieces"), "i32"),
}


def _case(name: str, kernel: Any, constants: Mapping[str, object], **fields: Any) -> Case:
    variable = set(kernel.arg_names) - set(constants)
    types = {argument: type for argument, type in TYPES.items() if argument in variable}
    return Case(name=name, kernel=kernel, types=types, constants=constants, **fields)


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
    yield _case(
        "rejection_sample, sum_weights",
        rejection_sample._sum_weights_kernel,
        constants={"N": rejection_sample.PIECE},
        options=rejection_sample.OPTIONS,
    )
    for name, constants in {"": {}, ", one draft": {"num_drafts": 1}}.items():  # a 1 becomes a constant
        yield _case(
            f"rejection_sample, accept{name}",
            rejection_sample._accept_kernel,
            constants={**constants, "P": 32},
            options={"num_warps": 1},
        )
    yield _case(
        "rejection_sample, recover",
        rejection_sample._recover_kernel,
        constants={"LEAST_SHARE": rejection_sample.LEAST_SHARE, "N": rejection_sample.PIECE // 4},
        options=rejection_sample.OPTIONS,
    )
    yield _case(
        "rejection_sample, finish",
        rejection_sample._finish_kernel,
        constants={"P": 32},
        options={"num_warps": 1},
    )
