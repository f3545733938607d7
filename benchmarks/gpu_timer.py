"""Times what is launched on a device: by events around a recorded graph on a GPU, by a clock where there is none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Launch = Callable[[], object]

MIN_LAUNCHES = 16
"""In one graph: what it costs to begin one is divided by as many."""
MIN_REPEATS, MAX_REPEATS = 5, 50
ENOUGH_S = 0.2
COLD_BYTES = 256 << 20
"""Read between two launches on the same data, which is several times the cache of any card."""
MAX_SETS = 16


class Timer(Protocol):
    """Of one device."""

    def seconds(self, launches: Sequence[Launch]) -> float:
        """Of one launch, the median of some repetitions; they follow each other without a gap."""

    def wait(self) -> None:
        """Until the device has done what it was asked for."""

    def num_sets(self, num_bytes: int) -> int:
        """How many sets of inputs to take turns with, so that each has left the cache before it is read again."""


class CudaTimer:
    """Launches are recorded as one graph, so that nobody waits for Python."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def seconds(self, launches: Sequence[Launch]) -> float:
        num_rounds = -(-MIN_LAUNCHES // len(launches))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # compiles, and chooses algorithms
            for launch in launches:
                launch()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(num_rounds):
                for launch in launches:
                    launch()
        graph.replay()
        torch.cuda.synchronize(self._device)
        times: list[float] = []
        started_s = time.perf_counter()
        while len(times) < MIN_REPEATS or (len(times) < MAX_REPEATS and time.perf_counter() - started_s < ENOUGH_S):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        return statistics.median(times) / (num_rounds * len(launches))

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def num_sets(self, num_bytes: int) -> int:
        return max(1, min(MAX_SETS, -(-COLD_BYTES // max(1, num_bytes))))


class HostTimer:
    """One launch of each: for a dry run."""

    def seconds(self, launches: Sequence[Launch]) -> float:
        started_s = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - started_s) / len(launches)

    def wait(self) -> None:
        return

    def num_sets(self, num_bytes: int) -> int:
        return 1


def timer_of(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def step_seconds(step: Launch, timer: Timer, *, num_steps: int, repeats: int = 3) -> float:
    """Of one of `num_steps` that a program launches one after the other, as fast as the slower of it and the device
    allows: the median of `repeats`."""
    step()
    timer.wait()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for _ in range(num_steps):
            step()
        timer.wait()
        times.append((time.perf_counter() - started_s) / num_steps)
    return statistics.median(times)
