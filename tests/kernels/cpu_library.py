"""Compiles the CPU library once a session for each instruction set this machine can run, and runs single ops on it."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.cpu.library import find_compiler, load, supported_sets
from kernels.cpu.packed_matrix import PackedMatrix, RowSource
from kernels.cpu.plan import Plan, PlannedRows, PlannedTensor
from kernels.cpu.structs import Format
from kernels.embedding import embedding_cpu
from kernels.linear import linear_cpu

CACHE_DIR = Path(tempfile.gettempdir()) / "weir-test-kernels"
HAS_COMPILER = find_compiler() is not None
SETS = [each.name for each in supported_sets()] if HAS_COMPILER else []
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")


@cache
def library(instruction_set: str) -> ctypes.CDLL:
    return load(CACHE_DIR, instruction_set)


def batch_of(num_tokens: int, num_logits: int = 0) -> SimpleNamespace:
    """A step's tensors, of which only the numbers of rows matter."""
    empty = torch.zeros(1, 1, dtype=torch.int32)
    return SimpleNamespace(
        input_ids=torch.arange(num_tokens),
        positions=empty,
        slots=empty,
        cu_seqlens_q=empty,
        seq_lens=torch.zeros(0),
        block_tables=empty,
        logits_indices=torch.zeros(num_logits, dtype=torch.int64),
    )


NO_CACHE = torch.zeros(1, 1, 2, 1, 1, 1)


def given(plan: Plan, value: torch.Tensor) -> PlannedRows:
    """Rows that have `value` in every step: an embedding of it."""
    matrix = PackedMatrix.pack(plan.library, Format.FLOAT32, [RowSource.of_floats(value)])
    return embedding_cpu(PlannedTensor(plan), matrix)


def run_linear(
    instruction_set: str,
    rows: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    is_gated: bool = False,
    num_threads: int = 2,
) -> torch.Tensor:
    plan = Plan(library(instruction_set), len(rows), len(rows))
    planned = None if residual is None else given(plan, residual)
    linear_cpu(given(plan, rows), matrix, bias, planned, is_gated=is_gated)
    plan.prepare(NO_CACHE, num_threads)
    try:
        return plan.run(batch_of(len(rows), len(rows))).clone()
    finally:
        plan.close()


def make_sampling_plan(instruction_set: str) -> Plan:
    """A plan whose threads draw tokens; what it computes beside that is of no matter."""
    plan = Plan(library(instruction_set), 1, 1)
    given(plan, torch.zeros(1, 1))
    plan.prepare(NO_CACHE, num_threads=2)
    return plan
