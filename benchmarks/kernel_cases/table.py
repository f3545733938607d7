"""All cases, the most telling first."""

from __future__ import annotations

import itertools
from functools import cache

from benchmarks.kernel_cases import attention, blocks, draws, experts, quantized, rows
from benchmarks.kernel_cases.work import KernelCase


@cache
def kernel_cases() -> tuple[KernelCase, ...]:
    return tuple(
        itertools.chain.from_iterable(group.cases() for group in (attention, rows, quantized, experts, draws, blocks))
    )
