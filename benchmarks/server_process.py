"""A measured server as a process of its own: started, awaited, weighed, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.machine import process_busy_s
from weir.cli.probes import free_ports

POLL_S = 0.05
KILL_TIMEOUT_S = 5.0
LAST_WORDS_CHARS = 300


class ServerFailed(Exception):
    """The server ended, or did not get ready in time; says what it printed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    """A server that is ready.

    Attributes:
        start_s: from the start of the process to its first good answer.
    """

    pid: int
    url: str
    start_s: float

    def memory_mib(self) -> dict[int, float]:
        """Of each process, by its id; nothing of a server that has ended."""
        return self._each(process_memory_mib)

    def busy_s(self) -> float:
        """CPU seconds of all of them."""
        return sum(self._each(process_busy_s).values())

    def _each(self, of: Callable[[int], float]) -> dict[int, float]:
        found: dict[int, float] = {}
        for pid in _descendants(self.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found[pid] = of(pid)
        return found


@contextmanager
def server_process(
    command: Sequence[str], *, ready_path: str, timeout_s: float, stop_timeout_s: float = 60.0
) -> Iterator[ServerProcess]:
    """Run `command`, in which `{port}` and `{grpc_port}` are replaced by free ports, until the block is left.

    Args:
        timeout_s: until it is ready.
        stop_timeout_s: after an interrupt, until it is killed.

    Raises:
        ServerFailed: it was not ready within `timeout_s`.
    """
    port, grpc_port = free_ports(2)
    argv = [part.format(port=port, grpc_port=grpc_port) for part in command]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            while not _answers(f"{url}{ready_path}"):
                if process.poll() is not None:
                    raise ServerFailed(f"ended with code {process.returncode}: {_last_words(log.fileno())}")
                if time.monotonic() - started_s > timeout_s:
                    raise ServerFailed(f"not ready after {timeout_s:g} s: {_last_words(log.fileno())}")
                time.sleep(POLL_S)
            yield ServerProcess(pid=process.pid, url=url, start_s=time.monotonic() - started_s)
        finally:
            _stop(process, stop_timeout_s)


@contextmanager
def weir_up(*options: str, timeout_s: float = 180.0) -> Iterator[ServerProcess]:
    """`weir up` of this checkout."""
    with server_process(weir_up_command(*options), ready_path="/ready", timeout_s=timeout_s) as server:
        yield server


def weir_up_command(*options: str) -> tuple[str, ...]:
    """For `server_process`."""
    return (sys.executable, "-m", "weir.cli", "up", "--port", "{port}", "--grpc-port", "{grpc_port}", *options)


def process_memory_mib(pid: int) -> float:
    """Proportional set size: pages that several processes map are divided among them."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024


def _heed_interrupts() -> None:
    """What runs in the background of a shell ignores interrupts, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Interrupted as by Ctrl-C; what of its session has not ended then is killed."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        _end_session(process.pid)


def _end_session(leader: int) -> None:
    """Kill what is left of it, and wait until it is gone, so that the next server has the machine to itself."""
    with suppress(ProcessLookupError):
        for _ in range(int(KILL_TIMEOUT_S / POLL_S)):
            os.killpg(leader, signal.SIGKILL)
            time.sleep(POLL_S)


def _last_words(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    words = os.pread(descriptor, LAST_WORDS_CHARS, max(0, size - LAST_WORDS_CHARS)).decode(errors="replace")
    return " ".join(words.split()) or "it said nothing"


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread or process that has just ended
            for task in Path(f"/proc/{parent}/task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
    return found
