"""`weir bench` as a process of its own, so that what makes the load shares nothing with what measures or serves it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class BenchFailed(Exception):
    """`weir bench` measured nothing; says why."""


def run_bench(url: str, *options: str, timeout_s: float) -> dict[str, Any]:
    """The record of one run. Raises BenchFailed."""
    command = [*(sys.executable, "-m", "weir.cli", "bench", "--base-url", url, "--quiet", "--json", "-"), *options]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as exc:
        raise BenchFailed(f"not done after {exc.timeout:g} s") from exc
    if not ended.stdout:
        raise BenchFailed(" ".join(ended.stderr.decode(errors="replace").split())[-300:])
    record: dict[str, Any] = json.loads(ended.stdout)
    return record
