from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weir.engine.device_claim import DeviceLedger

HOLD = """
import sys
from pathlib import Path
from weir.engine.device_claim import DeviceLedger
claim = DeviceLedger(Path(sys.argv[1])).claim_emptiest(sys.argv[2:], 0.9)
print(claim and claim.name, flush=True)
sys.stdin.read()
"""


def test_the_emptiest_gpu_is_claimed_and_a_full_host_has_none(tmp_path: Path) -> None:
    ledger = DeviceLedger(tmp_path)
    claims = [ledger.claim_emptiest(["a", "b", "c"], 0.5) for _ in range(7)]
    assert [claim and claim.name for claim in claims] == ["a", "b", "c", "a", "b", "c", None]
    assert claims[1] is not None
    claims[1].release()
    again = ledger.claim_emptiest(["a", "b", "c"], 0.5)
    assert again is not None
    assert again.name == "b"


def test_shares_that_add_up_to_one_fit(tmp_path: Path) -> None:
    ledger = DeviceLedger(tmp_path)
    for _ in range(10):
        assert ledger.claim_emptiest(["a"], 0.1) is not None
    assert ledger.claim_emptiest(["a"], 0.1) is None
    assert ledger.claimed()["a"] == pytest.approx(1.0)


def test_a_named_gpu_is_taken_whoever_else_uses_it(tmp_path: Path) -> None:
    ledger = DeviceLedger(tmp_path)
    assert [ledger.claim("a", 0.9).name for _ in range(2)] == ["a", "a"]
    found = ledger.claim_emptiest(["a", "b"], 0.9)
    assert found is not None
    assert found.name == "b"


def test_a_host_without_gpus_has_none_to_claim(tmp_path: Path) -> None:
    assert DeviceLedger(tmp_path / "new" / "folder").claim_emptiest([], 0.9) is None


def test_processes_see_each_others_claims_and_a_killed_one_leaves_none(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path), "a", "b"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    processes: list[subprocess.Popen[str]] = []
    try:
        names = []
        for _ in range(3):
            processes.append(start())
            assert processes[-1].stdout is not None
            names.append(processes[-1].stdout.readline().strip())
        assert names == ["a", "b", "None"]
        processes[0].kill()
        processes[0].wait()
        found = DeviceLedger(tmp_path).claim_emptiest(["a", "b"], 0.9)
        assert found is not None
        assert found.name == "a"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
