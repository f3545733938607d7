"""docs/kernels.md: every Triton kernel, what it must do at least, what it was seen to do, and what it takes of a GPU.

    python -m benchmarks.kernels_page [--write]

Prints the page, or writes it. Figures are those of the newest record of `benchmarks.gpu` in benchmarks/results; without
one, a figure is 'not yet measured'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_record import NOTHING, Record, Row, show_figure
from benchmarks.kernel_cases.table import kernel_cases
from benchmarks.kernel_cases.work import KernelCase

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/kernels.md"
LIMITS = ROOT / "tests/kernels/compiled.json"
RESULTS = ROOT / "benchmarks/results"
NOT_MEASURED = "not yet measured"

INTRODUCTION = """\
# Kernels

What Weir computes with on a GPU: Triton kernels in `kernels/gpu`, each beside a plain torch form in `kernels` that says
what it means. This page is written by `python -m benchmarks.kernels_page --write`.
"""
FLOORS = """\
## Floors

What a kernel must do at least: the bytes that go to or come from memory, and floating-point operations, of which a
multiply-add is two. e: bytes of an element, 2. c: bytes of an element of the cache, 2, or 1 in float8. dim: of a head.
k: experts of a token. No kernel can be faster than its bytes over the bandwidth of a large copy, or than its operations
over the rate of a large bfloat16 product; both are measured in the same run. A figure's share is the later of these two
times over its own. Products of e4m3 by e4m3 may pass one.
"""
COMPILED = """\
## Registers, spills, shared memory

Found without a GPU: each kernel compiled for each of these chips, at the shapes of Llama-3-8B and Qwen3-30B-A3B, as
registers a thread / bytes a thread spills / KiB of shared memory. A test fails when one of them grows
(tests/kernels/test_compiled.py).
"""
LEFT_OUT = """\
## Left out, and why

- Tensor descriptors in prefill attention. With the queries loaded by one, the kernel takes 13 to 56 registers more on
  sm_90 and a group has to be a power of two; a program loads its queries once for a whole context. New keys and values
  are read from the paged cache like all others, so that float8 ones are what later steps see.
- Caches of int8 on a GPU have no kernel: they go through the plain forms, which wait for the device. `fp8` is for GPUs.
- Experts of a mixture are not quantised, and on a GPU `batch_invariant` is refused with quantised weights.
- `lora_matmul` and `rejection_sample` are called by nothing yet: no adapter is loaded, and nothing drafts.
"""


def page(cases: Sequence[KernelCase], limits: Mapping[str, Any], record: Record | None) -> str:
    """The whole page."""
    return "\n".join(
        [
            INTRODUCTION,
            FLOORS,
            *_formulas(cases),
            "",
            "## Figures",
            "",
            _origin(record),
            "Goals are shares. Results are held against the plain form in the same run.",
            "",
            *_figures(cases, record),
            "",
            COMPILED,
            *_compiled(limits),
            "",
            LEFT_OUT,
        ]
    )


def newest_record(directory: Path = RESULTS) -> Record | None:
    """Of a GPU; by the date in its name."""
    paths = sorted(directory.glob("*-gpu.json"), reverse=True)
    records = (Record.load(path) for path in paths)
    return next((record for record in records if not record.is_dry), None)


def current_page() -> str:
    """What docs/kernels.md has to be."""
    return page(kernel_cases(), json.loads(LIMITS.read_text()), newest_record())


def _formulas(cases: Sequence[KernelCase]) -> Iterator[str]:
    yield "| op | does | bytes | operations | in kernels/gpu |"
    yield "| --- | --- | --- | --- | --- |"
    first_of_op = {case.op: case.work for case in reversed(cases)}
    for op in dict.fromkeys(case.op for case in cases):
        work = first_of_op[op]
        files = ", ".join(work.kernels)
        yield f"| `{op}` | {work.does} | {work.bytes_formula} | {work.flops_formula} | {files} |"


def _origin(record: Record | None) -> str:
    if record is None:
        return "`python -m benchmarks.gpu` measures all of them on one GPU in under six minutes; it has not run yet."
    card = record.card
    assert card is not None
    return f"`python -m benchmarks.gpu`, driver {card.driver}, torch {card.torch}, Triton {card.triton}."


def _figures(cases: Sequence[KernelCase], record: Record | None) -> Iterator[str]:
    rows = {} if record is None else {row.name: row for row in record.rows if row.section == "kernels"}
    yield "| op | at | MB | GFLOP | goal | figure | share | card | date |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in cases:
        floor = case.work.floor
        goal = "" if case.goal is None else f"{case.goal:.0%}"
        name = f"`{case.op}`, {case.name}"
        yield (
            f"| {name} | {case.work.shape} | {_show(floor.num_bytes / 1e6)} | {_show(floor.flops / 1e9)} | {goal} "
            f"| {' | '.join(_found(rows.get(case.title), record))} |"
        )


def _show(value: float) -> str:
    if not value:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _found(row: Row | None, record: Record | None) -> tuple[str, str, str, str]:
    """Figure, share, card, date."""
    if row is None or record is None or record.card is None:
        return (NOT_MEASURED, "", "", "")
    if row.is_right is False:
        figure = "wrong" if not row.failure else "failed"
    elif row.figure is None:
        figure = row.remark or "right"
    else:
        figure = show_figure(row.figure, row.unit)
    share = "" if row.share is None else f"{row.share:.0%}"
    return (figure, share, record.card.name, record.date)


def _compiled(limits: Mapping[str, Any]) -> Iterator[str]:
    kernels: Mapping[str, Mapping[str, Mapping[str, int]]] = limits["kernels"]
    chips = sorted({chip for found in kernels.values() for chip in found}, key=lambda chip: (chip[:2] != "sm", chip))
    yield f"Triton {limits['triton']}:"
    yield ""
    yield f"| kernel | {' | '.join(chips)} |"
    yield f"| --- |{' --- |' * len(chips)}"
    for name, found in kernels.items():
        yield f"| {name} | {' | '.join(_used(found.get(chip)) for chip in chips)} |"


def _used(found: Mapping[str, int] | None) -> str:
    if found is None:
        return NOTHING
    return f"{found['registers']} / {found['spilled_bytes']} / {found['shared_bytes'] / 1024:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(current_page())
    else:
        print(current_page(), end="")


if __name__ == "__main__":
    main()
