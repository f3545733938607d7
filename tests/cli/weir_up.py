"""`weir up` as a person runs it: a process in a terminal's place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from weir.cli.probes import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeirUp:
    """A running `weir up`."""

    process: asyncio.subprocess.Process
    url: str

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

    def kill(self, service: str) -> None:
        """End its child that runs `python -m service` as a crash would."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [pid for pid in children if service in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
        os.kill(int(pid), signal.SIGKILL)


@asynccontextmanager
async def weir_up(*options: str, home: Path, model: Path) -> AsyncIterator[WeirUp]:
    """`weir up` over `model` on free ports, ended with everything it started; it may still be starting."""
    port, grpc_port = free_ports(2)
    argv = ["--model", str(model), "--home", str(home), "--port", str(port), "--grpc-port", str(grpc_port), *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weir.cli", "up", *argv), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield WeirUp(process=process, url=f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
