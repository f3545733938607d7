"""`weir up` as a person runs it, as a process: the whole system for tests that see it from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from weir.cli.probes import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running `weir up`."""

    process: asyncio.subprocess.Process
    url: str
    grpc_address: str

    async def until(self, words: str) -> str:
        """The next line it prints that has `words`."""
        assert self.process.stderr is not None
        seen = ""
        async with asyncio.timeout(START_TIMEOUT_S):
            async for raw in self.process.stderr:
                seen += (line := raw.decode())
                if words in line:
                    return line
        raise AssertionError(f"ended before {words!r}:\n{seen}")

    def pid_of(self, service: str) -> int:
        """The child that runs `python -m service`, or the program `service`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if service in command[1:3] or service in Path(command[0]).name:
                return int(pid)
        raise AssertionError(f"no {service} among {children}")

    def option_of(self, service: str, option: str) -> str:
        """What a child was started with."""
        words = Path(f"/proc/{self.pid_of(service)}/cmdline").read_text().split("\0")
        return words[words.index(option) + 1]

    def kill(self, service: str) -> None:
        """End one service as a crash would."""
        os.kill(self.pid_of(service), signal.SIGKILL)


@asynccontextmanager
async def local_cluster(
    *options: str, home: Path, model: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[LocalCluster]:
    """`weir up` over `model` on free ports, ended with everything it started; it may still be starting.

    Args:
        environment: the services' own variables, such as WEIR_MAX_NUM_SEQS.
    """
    port, grpc_port = free_ports(2)
    argv = ["--model", str(model), "--home", str(home), "--port", str(port), "--grpc-port", str(grpc_port), *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.cli", "up", *argv),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield LocalCluster(process=process, url=f"http://127.0.0.1:{port}", grpc_address=f"127.0.0.1:{grpc_port}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
