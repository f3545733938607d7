from __future__ import annotations

from pathlib import Path

import pytest

from weir.engine.host_memory import available_bytes


def write(directory: Path, **files: str) -> tuple[Path, Path]:
    """A stand-in for /sys/fs/cgroup and /proc/meminfo."""
    for name, text in files.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory, directory / "meminfo"


def test_the_containers_limit_counts_when_it_is_less(tmp_path: Path) -> None:
    meminfo = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"
    places = write(tmp_path, meminfo=meminfo, memory_max="300000\n", memory_current="100000\n")
    assert available_bytes(*places) == 200_000
    write(tmp_path, memory_max="9000000\n")
    assert available_bytes(*places) == 1000 * 1024


@pytest.mark.parametrize("limit", ["max\n", ""])
def test_no_limit_leaves_the_machines_memory(tmp_path: Path, limit: str) -> None:
    places = write(tmp_path, meminfo="MemAvailable: 7 kB\n", memory_max=limit, memory_current="1\n")
    assert available_bytes(*places) == 7 * 1024


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    places = write(tmp_path, meminfo="MemAvailable: 7 kB\n", memory_max="10\n", memory_current="20\n")
    assert available_bytes(*places) == 0


def test_a_system_that_does_not_say_gets_an_estimate(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path / "none") > 1 << 20
