"""Every Triton kernel compiles for every GPU, and takes and spills no more than it did.

`python -m tests.kernels.compiled --write` makes new limits, after a look at what has grown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from tests.kernels.compiled import LIMITS, TARGETS

ROOT = Path(__file__).parents[2]
RECORD = json.loads(LIMITS.read_text())
LIMIT = RECORD["kernels"]
Figures = dict[str, dict[str, dict[str, int]]]


@pytest.fixture(scope="module")
def found() -> Figures:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    figures: Figures = json.loads(done.stdout)["kernels"]
    return figures


def test_every_kernel_compiles_and_has_limits(found: Figures) -> None:
    assert found.keys() == LIMIT.keys()


@pytest.mark.skipif(triton.__version__ != RECORD["triton"], reason="limits are of another version of Triton")
@pytest.mark.parametrize(("name", "gpu"), [(name, gpu) for name in LIMIT for gpu in LIMIT[name] if gpu in TARGETS])
def test_no_spill_appears_and_nothing_grows(found: Figures, name: str, gpu: str) -> None:
    used, limit = found[name][gpu], LIMIT[name][gpu]
    assert {figure: count for figure, count in used.items() if count > limit[figure]} == {}
