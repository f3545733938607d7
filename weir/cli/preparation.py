"""Getting a model ready, in a process of its own: that takes torch, which the command line never imports."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weir.cli.supervisor import die_with_parent
from weir.core.errors import ModelLoadError
from weir.runtime.config import child_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    model_dir: Path
    name: str


async def prepare_model(
    source: str, *, home: Path, progress: Callable[[str], None], name: str | None = None
) -> PreparedModel:
    """Run `python -m weir.engine.prepare`; a model that is prepared already takes a fraction of a second.

    Args:
        source: a path, `hf:org/name`, or a known name.
        progress: told each line of what goes on.

    Raises:
        ModelLoadError: in the words of the process.
    """
    last = ""

    def hear(line: str) -> None:
        nonlocal last
        last = line or last
        if not last.startswith("error: "):
            progress(last)

    naming = ("--name", name) if name else ()
    ended = await _run("weir.engine.prepare", source, "--home", str(home), *naming, said=hear)
    if ended.exit_code != 0:
        raise ModelLoadError(last.removeprefix("error: ") or f"model: {source} could not be prepared")
    fields = json.loads(ended.answer)
    return PreparedModel(model_dir=Path(fields["model_dir"]), name=fields["name"])


async def compile_kernels(cache_dir: Path, *, progress: Callable[[str], None]) -> None:
    """Have the CPU kernels in `cache_dir` before workers want them; that takes some ten seconds once.

    Where it fails, the workers say what they do without. A machine with a GPU has no use for them.
    """
    if not _has_gpu():
        await _run("kernels.cpu.library", "--best", str(cache_dir), said=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """What became of a process."""

    exit_code: int
    answer: bytes


async def _run(module: str, *arguments: str, said: Callable[[str], None]) -> _Ended:
    """Run a module of Weir to its end; `said` is told each line that it writes to stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        env=child_environment({"PYTHONPATH": python_path()}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async for raw in process.stderr:
            # A progress bar rewrites its line; only the newest state of it is news.
            said(raw.decode(errors="replace").rstrip().rpartition("\r")[2])
        answer = await process.stdout.read()
        return _Ended(exit_code=await process.wait(), answer=answer)
    finally:
        if process.returncode is None:
            process.kill()


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def python_path() -> str:
    """Lets a child import Weir from where this process did, whatever its working directory."""
    return str(Path(__file__).resolve().parents[2])
