"""Keeps a few processes alive: starts them, sees when they are ready, restarts what dies, ends them in order.

Knows nothing of what they are for. On Linux they die with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from weir.core.deadline import Clock
from weir.core.errors import ConfigError, UnavailableError, WeirError

EXIT_REFUSED = 2
PROBE_INTERVAL_S = 0.05
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0
"""A process that lived so long starts again with the first backoff."""
MAX_FAILED_STARTS = 3
"""A process that was never ready is not started more often."""
LOG_TAIL_LINES = 15

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Called in a child between fork and exec: the kernel kills it when its parent dies."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_child() -> None:
    """Ctrl-C is for us, and children are told in order; in sessions of their own `nice` would not reach across them.

    Linux gives each session the same share of the cores (autogroups) before it looks at niceness.
    """
    os.setpgid(0, 0)
    die_with_parent()


class ProcessState(Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waits to restart"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run.

    Attributes:
        is_ready: asked every 50 ms until it says yes; must not raise and must be quick.
        log_path: gets stdout and stderr.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    is_ready: Callable[[], Awaitable[bool]]


class SupervisedProcess:
    """One process and its successors."""

    def __init__(self, spec: ProcessSpec, on_change: Callable[[SupervisedProcess], None], clock: Clock) -> None:
        self.spec = spec
        self.state = ProcessState.STARTING
        self.detail = ""
        self.since_s = clock()
        self.was_ready = asyncio.Event()
        self._on_change = on_change
        self._clock = clock
        self._stop_requested = asyncio.Event()
        self._stopped = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Start, and start again, until `stop`.

        Raises:
            ConfigError: it refused its settings, in its own words.
            UnavailableError: it ended again and again without having been ready once.
        """
        num_failures = 0
        try:
            while True:
                started_s = self._clock()
                exit_code: int | None = None
                try:
                    exit_code = await self._run_once()
                    ending = _ending(exit_code)
                except OSError as exc:  # no process, or no log: there may be room for one later
                    ending = f"could not be started ({exc.strerror})"
                if self._stop_requested.is_set():
                    return
                if self._clock() - started_s > STEADY_S:
                    num_failures = 0
                num_failures += 1
                if not self.was_ready.is_set():
                    self._give_up_on(exit_code, ending, num_failures)
                backoff_s = min(FIRST_BACKOFF_S * 2 ** (num_failures - 1), MAX_BACKOFF_S)
                self._change(ProcessState.WAITING, f"{ending}; starts again in {backoff_s:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff_s):
                        await self._stop_requested.wait()
                        return
        finally:
            self._change(ProcessState.STOPPED, "")
            self._stopped.set()

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to drain, and kill it once `timeout_s` have passed. Harmless when repeated."""
        self._stop_requested.set()
        if self._stopped.is_set():
            return
        self._change(ProcessState.STOPPING, "")
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._stopped.wait()
        except TimeoutError:
            self.kill()
            await self._stopped.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> int:
        """One process from start to end; gives its exit code, negative for a signal."""
        self._change(ProcessState.STARTING, "")
        with self.spec.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=dict(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_become_child,
            )
        self._process = process
        try:
            if self._stop_requested.is_set():
                self._signal(signal.SIGTERM)
            while not await _has_ended(process, PROBE_INTERVAL_S):
                if self._stop_requested.is_set():
                    break
                if await self.spec.is_ready():
                    self._change(ProcessState.READY, "")
                    self.was_ready.set()
                    break
            return await process.wait()
        finally:
            if process.returncode is None:
                self.kill()
                await process.wait()
            self._process = None

    def _give_up_on(self, exit_code: int | None, ending: str, num_failures: int) -> None:
        if exit_code == EXIT_REFUSED:
            raise ConfigError(log_tail(self.spec.log_path, 1) or f"{self.spec.name} refused to start")
        if num_failures >= MAX_FAILED_STARTS:
            lines = log_tail(self.spec.log_path, LOG_TAIL_LINES).splitlines()
            shown = "\n".join(f"{self.spec.name} | {line}" for line in lines)
            raise UnavailableError(f"{self.spec.name} {ending} {num_failures} times\n{shown}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _change(self, state: ProcessState, detail: str) -> None:
        self.state, self.detail, self.since_s = state, detail, self._clock()
        self._on_change(self)


class Supervisor:
    """Owns the processes from entry to exit of its `async with`; on the way out it kills what still runs.

    Args:
        on_change: told after every change of state.
    """

    def __init__(self, on_change: Callable[[SupervisedProcess], None], clock: Clock = time.monotonic) -> None:
        self._on_change = on_change
        self._clock = clock
        self._group = asyncio.TaskGroup()
        self.processes: list[SupervisedProcess] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises the first refusal of a process, or what the body raised, alone and not in a group."""
        for process in self.processes:
            process._stop_requested.set()
        self.kill_all()
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            refusal = next((error for error in group.exceptions if isinstance(error, WeirError)), None)
            if refusal is not None:
                raise refusal from group
            if group.exceptions != (exc,):
                raise

    def start(self, spec: ProcessSpec) -> SupervisedProcess:
        process = SupervisedProcess(spec, self._on_change, self._clock)
        self.processes.append(process)
        self._group.create_task(process.run(), name=spec.name)
        return process

    def kill_all(self) -> None:
        for process in self.processes:
            process.kill()


def log_tail(path: Path, num_lines: int) -> str:
    """The last lines of a log that are not empty."""
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


async def _has_ended(process: asyncio.subprocess.Process, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by {signal.Signals(-exit_code).name}"
