"""The compiled library: which one a machine gets, when it is compiled, and what is said where it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.library import INSTRUCTION_SETS, InstructionSet, LibraryError, load, main, supported_sets
from tests.kernels.cpu_library import CACHE_DIR, needs_compiler

BEST = supported_sets()[0]


def write_compiler(directory: Path, script: str) -> None:
    """A `c++` that is all there is on the path."""
    directory.mkdir()
    (directory / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "c++").chmod(0o755)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A directory with the library of this machine, as another process has left it."""
    source = Path(load(CACHE_DIR, BEST.name)._name)
    (tmp_path / "cache").mkdir()
    for path in (source, source.with_suffix(".sha256")):
        shutil.copy(path, tmp_path / "cache" / path.name)
    return tmp_path / "cache"


@needs_compiler
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS, ids=lambda each: each.name)
def test_every_instruction_set_of_this_kind_of_machine_compiles(instruction_set: InstructionSet) -> None:
    if instruction_set.machine != BEST.machine:
        pytest.skip(f"{instruction_set.machine} needs another compiler")
    source = Path(library.__file__).with_name("weir.cpp")
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wno-psabi", *instruction_set.flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_a_library_that_is_there_is_not_compiled_again(built: Path) -> None:
    (found,) = built.glob("*.so")
    before = found.stat()
    load(built)
    assert [path.stat().st_mtime_ns for path in built.glob("*.so")] == [before.st_mtime_ns]


@needs_compiler
def test_half_a_library_is_compiled_again_and_without_a_compiler_it_is_none(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = built.glob("*.so")
    whole = found.read_bytes()
    found.write_bytes(whole[: len(whole) // 2])
    with monkeypatch.context() as without_compiler:
        without_compiler.setenv("PATH", os.devnull)
        with pytest.raises(LibraryError, match="has no library"):
            load(built)
    write_compiler(
        tmp_path / "bin",
        f"""for word; do [ "$last" = -o ] && out=$word; last=$word; done
[ "$1" = --version ] || cp {CACHE_DIR / found.name} "$out" """,
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    rebuilt = Path(load(built)._name)
    assert rebuilt.parent == built
    assert rebuilt.read_bytes() == whole


@needs_compiler
def test_without_a_compiler_a_library_that_another_made_serves(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert Path(load(built)._name).parent == built


def test_without_both_the_error_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(LibraryError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+, clang\+\+ .*has no library"):
        load(tmp_path)


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(tmp_path / "bin", 'echo "weir.cpp:1: no such luck" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    with pytest.raises(LibraryError, match="no such luck"):
        load(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_an_instruction_set_that_the_machine_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="cannot run sse9"):
        load(tmp_path, "sse9")


def test_an_image_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(SystemExit, match="no C"):
        main([str(tmp_path)])
