"""Everything about one GPU in one command of under six minutes: what the card can do, each kernel's results and time,
the engine, and both services over HTTP beside transformers' paged continuous batching.

    python -m benchmarks.gpu [--budget-s 340] [--only kernels engine ...] [--output FILE] [--scratch DIR]
    python -m benchmarks.gpu --dry-run      # the same code on tiny shapes without a GPU; no figure means anything

It takes what `pip install '.[local]'` brings, and pytest. Prints one table and writes one JSON,
benchmarks/results/DATE-gpu.json (a dry run only where --output says so). Weights are random, of Llama-3-8B's and
Qwen3-30B-A3B's shapes, and lie in --scratch meanwhile: 16 GB, in memory (/dev/shm) where that has room. Sections run in
the order of their importance, each in a process of its own with a limit; what the budget has no room for is left out,
and the table says so. Exit code: 0; 1 when something failed or a result was wrong; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from benchmarks.gpu_record import CARD_SECTION, Card, Record, Row
from benchmarks.gpu_section import Section, Situation, processes_of

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 340.0
SCRATCH_BYTES = 20 << 30
MEMORY_FILES = Path("/dev/shm")

SECTIONS = (
    Section(name=CARD_SECTION, module="benchmarks.gpu_card", limit_s=40, least_s=10),
    Section(name="kernels", module="benchmarks.gpu_kernels", limit_s=120, least_s=20, is_resumable=True),
    Section(name="engine", module="benchmarks.gpu_engine", limit_s=90, least_s=40),
    Section(name="equality", module="benchmarks.gpu_equality", limit_s=40, least_s=15),
    Section(name="services", module="benchmarks.gpu_services", limit_s=110, least_s=50),
    Section(name="transformers", module="benchmarks.gpu_transformers", limit_s=70, least_s=30),
    Section(name="experts", module="benchmarks.gpu_experts", limit_s=60, least_s=40),
)


def measure(sections: Sequence[Section], situation: Situation, budget_s: float) -> Record:
    """All that the budget has room for."""
    started_s = time.monotonic()
    record = Record(date=date.today().isoformat(), commit=_commit(), is_dry=situation.is_dry)
    processes = processes_of(sections)
    try:
        for section in sections:
            left_s = budget_s - (time.monotonic() - started_s)
            if left_s < section.least_s:
                record.skipped[section.name] = f"{left_s:.0f} s are left, it takes {section.least_s:.0f} at least"
                continue
            for found in section.run(replace(situation, peaks=record.peaks), processes, left_s):
                if isinstance(found, Card):
                    record.card = found
                    continue
                record.rows.append(found)
                print(f"{time.monotonic() - started_s:5.0f} s  {_line(found)}", file=sys.stderr, flush=True)
            if record.card is None:
                break
    except KeyboardInterrupt:
        record.skipped["the rest"] = "interrupted"
    record.seconds = round(time.monotonic() - started_s, 1)
    return record


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: tiny shapes, no figure means anything")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all sections")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="these sections")
    parser.add_argument("--output", type=Path, help="the JSON")
    parser.add_argument("--scratch", type=Path, help="a directory with room for 16 GB; what is put there goes again")
    args = parser.parse_args(argv)
    if args.dry_run:
        # Before any process that imports Triton, which reads it once.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # The card's own section comes first whatever is chosen: all shares are of what it finds.
    wanted = {CARD_SECTION, *(args.only or [section.name for section in SECTIONS])}
    sections = tuple(section for section in SECTIONS if section.name in wanted)
    scratch = args.scratch or _scratch_parent(0 if args.dry_run else SCRATCH_BYTES)
    with tempfile.TemporaryDirectory(dir=scratch, prefix="weir-gpu-") as directory:
        situation = Situation(device="cpu" if args.dry_run else "cuda:0", scratch=Path(directory))
        record = measure(sections, situation, args.budget_s)
    if record.card is None and not record.rows:
        print("benchmarks.gpu: torch sees no CUDA device; --dry-run goes through the same code without one")
        return 2
    print(record.table())
    output = args.output or (None if args.dry_run else ROOT / f"benchmarks/results/{record.date}-gpu.json")
    if output is not None:
        record.save(output)
        print(f"\n{output}", file=sys.stderr)
    return 0 if record.is_right else 1


def _line(row: Row) -> str:
    if row.failure:
        return f"{row.section}: {row.name}: {row.failure}"
    figure = "" if row.figure is None else f" {row.figure:.4g} {row.unit}"
    share = "" if row.share is None else f", {row.share:.1%}"
    return f"{row.section}: {row.name}:{figure}{share}{' WRONG' if row.is_right is False else ''}"


def _scratch_parent(num_bytes: int) -> Path | None:
    """Files in memory where they have room; else wherever temporary files go."""
    if MEMORY_FILES.is_dir() and os.access(MEMORY_FILES, os.W_OK) and shutil.disk_usage(MEMORY_FILES).free > num_bytes:
        return MEMORY_FILES
    return None


def _commit() -> str:
    """This checkout's, marked where it was changed; unknown where git does not know."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return (asked.stdout.strip() if asked is not None else "") or "unknown"


if __name__ == "__main__":
    sys.exit(main())
