from __future__ import annotations

import asyncio
import gc
import signal
import sys
from pathlib import Path

import pytest

from weir.runtime.service import loading

ROOT = Path(__file__).resolve().parents[2]

DRAINS = """
import asyncio, sys
from weir.runtime.service import ServiceContext, run_service

async def main(context: ServiceContext) -> None:
    print("ready", flush=True)
    await context.stopping.wait()
    print("draining", flush=True)
    {then}
    print("drained", flush=True)

run_service(main, name="drainer")
"""

RAISES = """
import asyncio
from weir.core.errors import ConfigError, ModelLoadError
from weir.runtime.service import ServiceContext, run_service

async def fail():
    raise {error}

async def main(context: ServiceContext) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())

run_service(main, name="failer")
"""


async def _start(script: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _read_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_drains_and_exits_0(number: signal.Signals) -> None:
    process = await _start(DRAINS.format(then="await asyncio.sleep(0)"))
    assert await _read_line(process) == "ready"
    process.send_signal(number)
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    assert out.decode().split() == ["draining", "drained"]
    assert process.returncode == 0
    assert f"drainer got {number.name}: drains" in err.decode()


async def test_the_second_signal_exits_at_once() -> None:
    process = await _start(DRAINS.format(then="await asyncio.Event().wait()"))
    assert await _read_line(process) == "ready"
    process.send_signal(signal.SIGTERM)
    assert await _read_line(process) == "draining"
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    assert out == b""
    assert process.returncode == 128 + signal.SIGTERM
    assert "exits at once" in err.decode()


@pytest.mark.parametrize("error", ["ConfigError('port: 0 is wrong')", "ModelLoadError('port: 0 is wrong')"])
async def test_a_refused_setting_is_one_line_and_exit_code_2(error: str) -> None:
    process = await _start(RAISES.format(error=error))
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    assert (out, err.decode(), process.returncode) == (b"", "failer: port: 0 is wrong\n", 2)


async def test_another_failure_is_a_traceback_and_exit_code_1() -> None:
    process = await _start(RAISES.format(error="KeyError('surprise')"))
    async with asyncio.timeout(20):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert "failer ends: it failed" in err.decode()
    assert "KeyError: 'surprise'" in err.decode()


def test_the_collector_rests_while_libraries_are_loaded_and_leaves_them_alone_afterwards() -> None:
    try:
        with loading():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
