from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weir.cli.supervisor import (
    MAX_FAILED_STARTS,
    ProcessSpec,
    ProcessState,
    SupervisedProcess,
    Supervisor,
    log_tail,
)
from weir.core.errors import ConfigError, UnavailableError

ROOT = Path(__file__).resolve().parents[2]
WAITS = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); open(sys.argv[1], 'w'); signal.pause()"
)
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); signal.pause()"


class Changes:
    """Every change of state, and a way to wait for one."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ProcessState]] = []
        self._changed = asyncio.Event()

    def __call__(self, process: SupervisedProcess) -> None:
        self.seen.append((process.spec.name, process.state))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def _spec(tmp_path: Path, script: str, name: str = "worker") -> ProcessSpec:
    """A process that is ready once it has made its file, which each new start has to make again."""
    mark = tmp_path / f"{name}.ready"

    async def is_ready() -> bool:
        try:
            mark.unlink()
        except FileNotFoundError:
            return False
        return True

    return ProcessSpec(
        name=name,
        argv=[sys.executable, "-c", script, str(mark)],
        environment=dict(os.environ),
        log_path=tmp_path / f"{name}.log",
        is_ready=is_ready,
    )


async def test_a_process_is_started_seen_ready_and_drained(tmp_path: Path) -> None:
    changes = Changes()
    async with Supervisor(changes) as supervisor:
        process = supervisor.start(_spec(tmp_path, WAITS))
        await process.was_ready.wait()
        await process.stop(20)
    assert [state for _, state in changes.seen] == [
        ProcessState.STARTING,
        ProcessState.READY,
        ProcessState.STOPPING,
        ProcessState.STOPPED,
    ]


async def test_a_process_is_out_of_reach_of_the_terminal_and_in_reach_of_niceness(tmp_path: Path) -> None:
    async with Supervisor(Changes()) as supervisor:
        process = supervisor.start(_spec(tmp_path, WAITS))
        await process.was_ready.wait()
        assert process.pid is not None
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) == os.getsid(0)
        await process.stop(20)


async def _run_until_it_fails(spec: ProcessSpec, changes: Changes) -> None:
    async with Supervisor(changes) as supervisor:
        supervisor.start(spec)
        await asyncio.Event().wait()


async def test_a_killed_process_is_restarted_and_ready_again(tmp_path: Path) -> None:
    changes = Changes()
    async with Supervisor(changes) as supervisor:
        process = supervisor.start(_spec(tmp_path, WAITS))
        await process.was_ready.wait()
        first_pid = process.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        await changes.until(lambda: changes.seen.count(("worker", ProcessState.READY)) == 2)
        assert process.pid != first_pid
        assert (changes.seen[2][1], changes.seen[3][1]) == (ProcessState.WAITING, ProcessState.STARTING)


async def test_one_that_the_system_has_no_room_for_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_refused = asyncio.create_subprocess_exec, 0

    async def start_later(*argv: str, **options: object) -> asyncio.subprocess.Process:
        nonlocal num_refused
        num_refused += 1
        if num_refused == 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start(*argv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_later)
    changes = Changes()
    async with Supervisor(changes) as supervisor:
        process = supervisor.start(_spec(tmp_path, WAITS))
        await process.was_ready.wait()
        await process.stop(20)
    assert (changes.seen[1][1], changes.seen[2][1]) == (ProcessState.WAITING, ProcessState.STARTING)


async def test_one_that_cannot_be_started_is_given_up_in_one_line(tmp_path: Path) -> None:
    spec = replace(_spec(tmp_path, WAITS), argv=["/no/such/program"])
    with pytest.raises(UnavailableError, match=r"^worker could not be started \(No such file or directory\) 3 times"):
        await _run_until_it_fails(spec, Changes())


async def test_a_process_that_ignores_the_drain_is_killed(tmp_path: Path) -> None:
    changes = Changes()
    async with Supervisor(changes) as supervisor:
        process = supervisor.start(_spec(tmp_path, DEAF))
        await process.was_ready.wait()
        await process.stop(0.05)
        assert process.state is ProcessState.STOPPED


async def test_a_refused_setting_is_the_process_own_last_line(tmp_path: Path) -> None:
    script = "import sys; print('starting'); print('port: 1 is in use', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"^port: 1 is in use$"):
        await _run_until_it_fails(_spec(tmp_path, script), Changes())


async def test_one_that_never_gets_ready_is_given_up_with_the_end_of_its_log(tmp_path: Path) -> None:
    changes = Changes()
    spec = _spec(tmp_path, "import sys; print('no luck'); sys.exit(3)")
    with pytest.raises(UnavailableError) as caught:
        await _run_until_it_fails(spec, changes)
    assert changes.seen.count(("worker", ProcessState.STARTING)) == MAX_FAILED_STARTS
    assert caught.value.message.startswith("worker ended with exit code 3 3 times\nworker | no luck")


async def test_leaving_early_kills_every_process(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail_when_ready() -> None:
        async with Supervisor(Changes()) as supervisor:
            for name in ("a", "b"):
                process = supervisor.start(_spec(tmp_path, DEAF, name))
                await process.was_ready.wait()
                assert process.pid is not None
                pids.append(process.pid)
            raise KeyError("the command failed")

    with pytest.raises(KeyError):
        await fail_when_ready()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="a parent-death signal is a thing of Linux")
async def test_processes_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent_script = f"""
import asyncio, os, sys
from pathlib import Path
from weir.cli.supervisor import ProcessSpec, Supervisor
async def main():
    mark = Path({str(tmp_path)!r}) / "mark"
    async def is_ready(): return mark.exists()
    spec = ProcessSpec(name="child", argv=[sys.executable, "-c", {DEAF!r}, str(mark)],
                       environment=dict(os.environ), log_path=mark.with_suffix(".log"), is_ready=is_ready)
    async with Supervisor(lambda process: None) as supervisor:
        child = supervisor.start(spec)
        await child.was_ready.wait()
        print(child.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent_script), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        child_pid = int(await parent.stdout.readline())
        ended = asyncio.Event()
        child = os.pidfd_open(child_pid)
        asyncio.get_running_loop().add_reader(child, ended.set)
        try:
            parent.kill()
            await ended.wait()
            await parent.wait()
        finally:
            asyncio.get_running_loop().remove_reader(child)
            os.close(child)


def test_the_tail_of_a_log_has_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"one\n\ntwo\nthr\xffee\n\n")
    assert log_tail(log, 2) == "two\nthr\ufffdee"
    assert log_tail(tmp_path / "gone", 2) == ""
