"""The ways in which one set of prompts can reach its tokens: a full product, and few cases with all pairs of values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_SIZES = (1, 16, 256)
WARM_CACHES = ("hot", "prefill hot", "decode hot")
"""Which prefix caches have the prompts; every case starts with both cold."""

_FACTORS: Mapping[str, Sequence[Any]] = {
    "prefill_block": BLOCK_SIZES,
    "decode_block": BLOCK_SIZES,
    "warm_cache": WARM_CACHES,
    "is_chunked": (True, False),
    "is_preempted": (True, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityCase:
    """One way.

    Attributes:
        caches: what the prefix caches have, one round of all prompts after the other.
        is_chunked: prompts are computed in chunks of few tokens, else in one.
        is_preempted: the decode worker's pool is too small for all, so that some give way and are computed again.
    """

    prefill_block: int
    decode_block: int
    caches: tuple[str, ...]
    is_chunked: bool
    is_preempted: bool

    def __str__(self) -> str:
        words = [f"blocks {self.prefill_block} to {self.decode_block}", self.caches[-1]]
        words += ["chunked"] * self.is_chunked + ["preempted"] * self.is_preempted
        return ", ".join(words)


def pairwise_cases() -> list[EqualityCase]:
    """Few cases in which every value of a factor meets every value of every other factor."""
    return [EqualityCase(caches=("cold", values.pop("warm_cache")), **values) for values in all_pairs(_FACTORS)]


def product_cases() -> list[EqualityCase]:
    """Every combination, each with both caches cold and then hot."""
    factors = {name: values for name, values in _FACTORS.items() if name != "warm_cache"}
    return [
        EqualityCase(caches=("cold", "hot"), **dict(zip(factors, values, strict=True)))
        for values in itertools.product(*factors.values())
    ]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows that cover all pairs of values of two factors: greedily, each row the one that covers most new pairs."""
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.append(row)
        missing -= _pairs(row)
    return chosen


def _pairs(row: Mapping[str, Any]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))
