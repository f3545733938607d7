"""Steps that follow each other at once, on more threads than cores, so that threads come late all the time."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.packed_matrix import PackedMatrix, RowSource
from kernels.cpu.plan import Plan
from kernels.cpu.structs import Format
from kernels.linear import linear_cpu
from tests.kernels.cpu_library import NO_CACHE, SETS, batch_of, given, library

NUM_OPS = 8
SIZES = (1, 200, 3, 90)
NUM_STEPS = 1500


def make_plan(instruction_set: str) -> Plan:
    """A chain of small matrices: more phases than work."""
    torch.manual_seed(0)
    plan = Plan(library(instruction_set), max(SIZES), 1)
    rows = given(plan, torch.randn(max(SIZES), 48))
    for _ in range(NUM_OPS):
        source = RowSource.of_floats(torch.randn(48, 48) / 7)
        rows = linear_cpu(rows, PackedMatrix.pack(plan.library, Format.FLOAT32, [source]))
    return plan


@pytest.mark.parametrize("num_spins", [0, 200])
@pytest.mark.parametrize("instruction_set", SETS[:1])
def test_a_thread_that_comes_late_does_nothing_of_another_step(instruction_set: str, num_spins: int) -> None:
    alone = make_plan(instruction_set)
    alone.prepare(NO_CACHE, 1)
    expected = {size: alone.run(batch_of(size)).clone() for size in SIZES}
    crowded = make_plan(instruction_set)
    crowded.prepare(NO_CACHE, 8, num_spins=num_spins)
    for step in range(NUM_STEPS):
        size = SIZES[step % len(SIZES)]
        assert torch.equal(crowded.run(batch_of(size)), expected[size]), step
