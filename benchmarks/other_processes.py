"""What else runs on the machine while a server is measured."""

from __future__ import annotations

import os
import time

from benchmarks.machine import busy_s, process_busy_s
from benchmarks.server_process import ServerProcess


class OtherProcesses:
    """All but a server, this process and its children that have ended: what they compute from now on."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._started_s = time.monotonic()
        self._busy_before_s = self._busy_s()

    def share(self) -> float:
        """Of all cores."""
        elapsed_s = time.monotonic() - self._started_s
        return max(0.0, self._busy_s() - self._busy_before_s) / (elapsed_s * (os.cpu_count() or 1))

    def _busy_s(self) -> float:
        return busy_s() - self._server.busy_s() - process_busy_s(os.getpid())


def await_calm(server: ServerProcess, *, share: float, timeout_s: float) -> None:
    """Wait for a second in which others take no more than `share` of the cores, or until the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        others = OtherProcesses(server)
        time.sleep(1.0)
        if others.share() <= share:
            return
