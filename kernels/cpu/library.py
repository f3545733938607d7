"""The C++ bodies of the ops as one shared library: built by the machine's compiler on first use, then kept.

A library is named by what it was made from: the sources, the compiler and the instruction set. Beside it lies its
digest, without which it counts as damaged: to map half a library is to be killed by it. Nothing here needs torch.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.cpu.structs import STRUCTS

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_MAIN = "weir.cpp"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_SELF_CONTAINED = ("-static-libstdc++", "-static-libgcc")
"""On Linux, so that a library runs in an image without a compiler's own."""
_COMPILERS = ("c++", "g++", "clang++")
_NO_COMPILER = f"no C++ compiler: none of {', '.join(_COMPILERS)} is on the path"
_BUILD_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One way to compile the sources.

    Attributes:
        name: as it is logged.
        machine: `platform.machine()` of the processors that may have it.
        needs: features a processor must list to run it.
        flags: for the compiler.
    """

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512-vnni",
        "x86_64",
        _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
        ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    ),
    InstructionSet("avx2", "x86_64", _AVX2, ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet("x86-64", "x86_64", frozenset(), ()),
    InstructionSet("neon-dotprod", "aarch64", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod+fp16",)),
    InstructionSet("neon", "aarch64", frozenset(), ()),
)
"""Best first."""


LAYOUT = hashlib.sha256((_SOURCES / "pack.h").read_bytes()).hexdigest()[:8]
"""Names the layout of packed matrices: files of another one are not read."""


class LibraryError(Exception):
    """There is no library for this machine; the message says why."""


def supported_sets() -> list[InstructionSet]:
    """What this machine can run, best first."""
    features = _cpu_features()
    return [each for each in INSTRUCTION_SETS if each.machine == _machine() and each.needs <= features]


@cache
def load(cache_dir: Path, instruction_set: str | None = None) -> ctypes.CDLL:
    """The library, compiled if `cache_dir` does not have it yet; without a compiler, one that another made.

    Args:
        cache_dir: where compiled libraries are kept; made if it does not exist.
        instruction_set: the name of a set to use instead of the best.

    Raises:
        LibraryError: no compiler and no library, or it failed, or the machine has no such instruction set.
    """
    sets = [each for each in supported_sets() if instruction_set in (None, each.name)]
    if not sets:
        raise LibraryError(f"this machine cannot run {instruction_set or 'any instruction set that there is code for'}")
    compiler = find_compiler()
    path = _find_built(cache_dir, sets) if compiler is None else build(cache_dir, compiler, sets[0])
    library = ctypes.CDLL(str(path))
    library.weir_panel_bytes.restype = ctypes.c_int64
    library.weir_runner_create.restype = ctypes.c_void_p
    library.weir_runner_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.weir_runner_run.restype = None
    library.weir_runner_sample.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    library.weir_runner_sample.restype = None
    library.weir_runner_destroy.argtypes = [ctypes.c_void_p]
    sizes = (ctypes.c_int64 * len(STRUCTS))()
    library.weir_struct_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(struct) for struct in STRUCTS], "structs.py is not what step.h says"
    return library


def build(cache_dir: Path, compiler: str, instruction_set: InstructionSet) -> Path:
    """The library for one instruction set in `cache_dir`, compiled if it is not there. Raises LibraryError."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False).stdout
    path = cache_dir / f"{_stem(instruction_set)}-{hashlib.sha256(version).hexdigest()[:8]}.so"
    if not _is_whole(path):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers that start at once, one compiles
            if not _is_whole(path):
                _compile(compiler, instruction_set, path)
    return path


def _find_built(cache_dir: Path, sets: list[InstructionSet]) -> Path:
    for instruction_set in sets:
        for path in sorted(cache_dir.glob(f"{_stem(instruction_set)}-*.so")):
            if _is_whole(path):
                return path
            logger.warning("%s is damaged", path)
    raise LibraryError(f"{_NO_COMPILER}, and {cache_dir} has no library")


def _is_whole(path: Path) -> bool:
    try:
        return _digest_file(path).read_text() == _digest(path)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _machine() -> str:
    return {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def _cpu_features() -> frozenset[str]:
    if platform.system() == "Darwin":
        return frozenset({"asimddp"}) if platform.machine() == "arm64" else frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def find_compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name)) is not None), None)


def _stem(instruction_set: InstructionSet) -> str:
    digest = hashlib.sha256()
    for part in (*_FLAGS, *instruction_set.flags):
        digest.update(part.encode() + b"\0")
    for path in sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{instruction_set.name}-{digest.hexdigest()[:16]}"


def _compile(compiler: str, instruction_set: InstructionSet, path: Path) -> None:
    logger.info("compiling the CPU kernels for %s, once", instruction_set.name)
    started_s = time.monotonic()
    unfinished = path.with_suffix(".tmp")
    linking = _SELF_CONTAINED if platform.system() == "Linux" else ()
    command = [compiler, *_FLAGS, *linking, *instruction_set.flags, "-o", str(unfinished), str(_SOURCES / _MAIN)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise LibraryError(f"{compiler} took more than {_BUILD_TIMEOUT_S} s") from exc
    if done.returncode:
        raise LibraryError(f"{compiler} failed: {(done.stderr or 'it said nothing').strip().splitlines()[0]}")
    unfinished.replace(path)
    _digest_file(path).write_text(_digest(path))
    logger.info("compiled in %.0f s", time.monotonic() - started_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile for every instruction set of this machine's kind, for an image that others run without a compiler; or for
    the machine itself."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.library", description=main.__doc__)
    parser.add_argument("cache_dir", type=Path, help="where to put the libraries")
    parser.add_argument("--best", action="store_true", help="just the set that this machine runs best")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if (compiler := find_compiler()) is None:
        raise SystemExit(f"{_NO_COMPILER}; without kernels Weir computes with torch, several times slower")
    own = [each for each in INSTRUCTION_SETS if each.machine == _machine()]
    try:
        for instruction_set in supported_sets()[:1] if arguments.best else own:
            sys.stdout.write(f"{build(arguments.cache_dir, compiler, instruction_set)}\n")
    except (LibraryError, OSError) as exc:
        raise SystemExit(str(exc)) from exc
    return 0


if __name__ == "__main__":
    sys.exit(main())
