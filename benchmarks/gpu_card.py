"""What the card can do: the denominators of all shares, and what a launch costs."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu_record import CARD_SECTION, COPY, PRODUCT, Card, Row
from benchmarks.gpu_section import Begun, Message, Situation
from benchmarks.gpu_timer import Timer, step_seconds, timer_of
from kernels.gpu.gate_and_mul import gate_and_mul_triton

COPY_BYTES = 2 << 30
PRODUCT_SIZE = 8192
DRY_COPY_BYTES = 1 << 20
DRY_PRODUCT_SIZE = 64


def measure(situation: Situation) -> Iterator[Message]:
    """Nothing at all where there is no such device."""
    device = torch.device(situation.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    yield describe(device)
    timer = timer_of(device)
    yield Begun(COPY)
    yield measure_copy(DRY_COPY_BYTES if situation.is_dry else COPY_BYTES, device, timer)
    yield Begun(PRODUCT)
    yield measure_product(DRY_PRODUCT_SIZE if situation.is_dry else PRODUCT_SIZE, device, timer)
    yield Begun("launch")
    small = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    num_steps = 2 if situation.is_dry else 1000
    from_python = step_seconds(lambda: gate_and_mul_triton(small, "silu"), timer, num_steps=num_steps)
    yield Row(section=CARD_SECTION, name="launch of a small kernel, from Python", figure=from_python, unit="s")
    in_graph = timer.seconds([lambda: gate_and_mul_triton(small, "silu")])
    yield Row(section=CARD_SECTION, name="launch of a small kernel, in a graph", figure=in_graph, unit="s")


def measure_copy(num_bytes: int, device: torch.device, timer: Timer) -> Row:
    """From one place of the device's memory to another."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = timer.seconds([lambda: target.copy_(source)])
    return Row(
        section=CARD_SECTION,
        name=COPY,
        shape=f"{num_bytes >> 20} MiB, read and written",
        figure=2 * num_bytes / seconds / 1e9,
        unit="GB/s",
        num_bytes=2 * num_bytes,
    )


def measure_product(size: int, device: torch.device, timer: Timer) -> Row:
    """By torch's library, on random values: zeros take less power and are faster."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = timer.seconds([lambda: left @ right])
    return Row(
        section=CARD_SECTION,
        name=PRODUCT,
        shape=f"{size:,} x {size:,} x {size:,}",
        figure=2 * size**3 / seconds / 1e12,
        unit="TFLOP/s",
        flops=2 * size**3,
    )


def describe(device: torch.device) -> Card:
    is_cuda = device.type == "cuda"
    return Card(
        name=torch.cuda.get_device_name(device) if is_cuda else "none",
        driver=_driver() if is_cuda else "none",
        python=platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "triton", "transformers")},
    )


def _driver(version: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of NVIDIA's, from the kernel or, where a container hides that, from its own tool."""
    if version.exists():
        words = version.read_text().split()
        return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "unknown")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.split("\n")[0].strip() or "unknown"
