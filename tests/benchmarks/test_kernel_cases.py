"""What kernels must do at least, by hand; and no kernel is without a case, nor a case without its line on the page."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.floor import Floor, Peaks
from benchmarks.kernel_cases.attention import DecodeAttention, Heads, PrefillAttention, RotateAndStore
from benchmarks.kernel_cases.blocks import CopyBlocks
from benchmarks.kernel_cases.draws import RejectionSample, Sample
from benchmarks.kernel_cases.experts import LoraMatmul, Moe
from benchmarks.kernel_cases.quantized import QuantizedMatmul, QuantizeRows
from benchmarks.kernel_cases.rows import AddRmsNorm, GateAndMul, InvariantLinear, RmsNorm, RotaryEmbedding
from benchmarks.kernel_cases.table import kernel_cases
from benchmarks.kernel_cases.work import Work
from benchmarks.kernels_page import PAGE, current_page
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.quantized_matrix import CodeFormat

ROOT = Path(__file__).parents[2]
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
BY_HAND: list[tuple[Work, Floor]] = [
    # 2 x 10 tokens of 32 values, and 2 queries and results of 32 values; 20 tokens x 32 query values x 4
    (DecodeAttention(heads=HEADS, num_seqs=2, context=10), Floor(num_bytes=20 * 64 + 2 * 2 * 64, flops=2560)),
    (
        DecodeAttention(heads=HEADS, num_seqs=2, context=10, kv_dtype=FLOAT8),
        Floor(num_bytes=20 * 32 + 2 * 2 * 64, flops=2560),
    ),
    # 3 new tokens see 8, 9 and 10
    (PrefillAttention(heads=HEADS, num_new=3, context=10), Floor(num_bytes=640 + 2 * 3 * 64, flops=4 * 27 * 32)),
    # read 64 values, write 48 turned ones and 32 to the cache; 8 angles in float32, a position and a slot
    (RotateAndStore(heads=HEADS, num_tokens=5, context=10), Floor(num_bytes=5 * (128 + 96 + 64 + 32 + 16))),
    (RmsNorm(num_rows=3, size=10), Floor(num_bytes=140)),
    (AddRmsNorm(num_rows=3, size=10), Floor(num_bytes=260)),
    (GateAndMul(activation="silu", num_rows=3, size=10), Floor(num_bytes=180)),
    (RotaryEmbedding(num_tokens=3, num_heads=2, head_dim=8), Floor(num_bytes=3 * (64 + 32))),
    (InvariantLinear(num_rows=3, num_outputs=5, num_inputs=7), Floor(num_bytes=2 * (35 + 3 * 12), flops=210)),
    (
        QuantizedMatmul(format=CodeFormat.INT4, num_rows=3, num_outputs=5, num_inputs=64),
        Floor(num_bytes=160 + 5 * 2 * 2 + 2 * 3 * 69, flops=2 * 3 * 5 * 64),
    ),
    (
        QuantizedMatmul(format=CodeFormat.INT8, num_rows=3, num_outputs=5, num_inputs=64),
        Floor(num_bytes=320 + 5 * 4 + 2 * 3 * 69, flops=2 * 3 * 5 * 64),
    ),
    (QuantizeRows(num_rows=3, size=70, group_size=32), Floor(num_bytes=3 * (140 + 70 + 12))),
    # three tokens of two experts each meet all four; a gate, an up and a down matrix of 50 each
    (
        Moe(num_tokens=3, num_experts=4, top_k=2, hidden_size=10, size=5),
        Floor(num_bytes=2 * (4 * 150 + 3 * 24), flops=2 * 3 * 2 * 150),
    ),
    (
        Moe(num_tokens=1, num_experts=4, top_k=2, hidden_size=10, size=5),
        Floor(num_bytes=2 * (2 * 150 + 24), flops=2 * 2 * 150),
    ),
    # of five tokens the first and the fourth have no adapter
    (
        LoraMatmul(num_tokens=5, num_adapters=2, rank=4, num_inputs=10, num_outputs=6),
        Floor(num_bytes=2 * (2 * 4 * 16 + 3 * 22), flops=2 * 3 * 4 * 16),
    ),
    (Sample(num_rows=3, vocab_size=50, top_p=0.9), Floor(num_bytes=4 * 150)),
    # of each sequence three rows of logits and two of what drafted
    (RejectionSample(num_seqs=3, num_drafts=2, vocab_size=50), Floor(num_bytes=4 * 3 * 5 * 50)),
    (CopyBlocks(num_copies=3, block_bytes=80), Floor(num_bytes=480)),
]


@pytest.mark.parametrize(("work", "floor"), BY_HAND, ids=lambda value: type(value).__name__)
def test_a_floor_is_what_one_counts_by_hand(work: Work, floor: Floor) -> None:
    assert work.floor == floor


def test_every_kind_of_work_is_counted_by_hand() -> None:
    assert {type(case.work) for case in kernel_cases()} == {type(work) for work, _ in BY_HAND}


def test_a_floor_takes_the_longer_of_its_two_times() -> None:
    peaks = Peaks(bytes_per_s=10.0, flops_per_s=100.0)
    assert Floor(num_bytes=20, flops=100).seconds(peaks) == 2.0
    assert Floor(num_bytes=20, flops=500).seconds(peaks) == 5.0


def test_every_file_with_a_kernel_has_a_case() -> None:
    files = (ROOT / "kernels/gpu").glob("*.py")
    with_kernels = {path.stem for path in files if any(map(_is_kernel, ast.walk(ast.parse(path.read_text()))))}
    assert with_kernels
    assert with_kernels - {name for case in kernel_cases() for name in case.work.kernels} == set()


def test_every_case_names_files_and_ops_that_are_there() -> None:
    for case in kernel_cases():
        assert (ROOT / f"kernels/{case.op}.py").exists()
        assert all((ROOT / f"kernels/gpu/{name}.py").exists() for name in case.work.kernels)


def test_titles_tell_cases_apart() -> None:
    titles = [case.title for case in kernel_cases()]
    assert len(set(titles)) == len(titles)


def test_pools_beyond_the_reach_of_31_bits_are() -> None:
    """The first element that a sequence has, not counting what lies behind it."""
    far = [case.work for case in kernel_cases() if getattr(case.work, "skipped_blocks", 0)]
    assert len(far) == 3
    for work in far:
        assert isinstance(work, DecodeAttention | PrefillAttention | RotateAndStore)
        pool = replace(work, skipped_blocks=1).make_pool(1, torch.device("meta"))
        assert work.skipped_blocks * pool.keys.stride(0) > 2**31


def test_a_wrong_result_is_far_from_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    work = CopyBlocks(num_copies=3, block_bytes=80)
    trial = work.make(torch.device("cpu"))
    assert trial.error() == 0.0
    monkeypatch.setattr("benchmarks.kernel_cases.blocks.copy_rows_triton", lambda *_: None)
    assert work.make(torch.device("cpu")).error() == float("inf")


def test_the_page_is_made_of_the_cases() -> None:
    """`python -m benchmarks.kernels_page --write` after a new kernel, case, compile limit or record."""
    assert PAGE.read_text() == current_page()


def _is_kernel(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    )
