from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.other_processes import OtherProcesses
from benchmarks.server_process import ServerProcess

SPIN_S = 0.5
SPIN = f"import time\nwhile time.process_time() < {SPIN_S}: pass\nprint('done', flush=True)\ntime.sleep(600)"


@contextmanager
def _running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _server(process: subprocess.Popen[bytes]) -> ServerProcess:
    return ServerProcess(pid=process.pid, url="", start_s=0.0)


def test_what_the_server_computes_is_not_the_others() -> None:
    started_s = time.monotonic()
    with _running(SPIN) as spinning, _running("import time; time.sleep(600)") as idle:
        beside_spinning, beside_idle = OtherProcesses(_server(spinning)), OtherProcesses(_server(idle))
        assert spinning.stdout is not None
        assert spinning.stdout.readline() == b"done\n"
        difference = beside_idle.share() - beside_spinning.share()
        elapsed_s = time.monotonic() - started_s
    assert SPIN_S / 2 < difference * elapsed_s * (os.cpu_count() or 1) < SPIN_S * 1.5
