"""What a measurement ran on: the machine in words, and how much of it was busy."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe_machine() -> str:
    """Cores, processor, system and Python."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, Python {platform.python_version()}"


def busy_s() -> float:
    """CPU seconds that all processes of the machine have taken since it started, and those that its host kept."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_busy_s(pid: int) -> float:
    """CPU seconds of one process, and of the children that it has seen end."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
