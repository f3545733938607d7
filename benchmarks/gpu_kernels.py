"""Every Triton kernel against its plain counterpart, then its time against what the card can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.gpu_record import Row, show_figure
from benchmarks.gpu_section import Begun, Message, Situation
from benchmarks.gpu_timer import Timer, timer_of
from benchmarks.kernel_cases.table import kernel_cases
from benchmarks.kernel_cases.work import KernelCase, Trial, Work

SECTION = "kernels"


def measure(situation: Situation) -> Iterator[Message]:
    device = torch.device(situation.device)
    timer = timer_of(device)
    for case in chosen_cases(situation):
        yield Begun(case.title)
        yield measure_case(case, situation, device, timer)


def chosen_cases(situation: Situation) -> list[KernelCase]:
    """Those not begun yet; in a dry run each small work once."""
    cases = [case for case in kernel_cases() if case.title not in situation.done]
    if not situation.is_dry:
        return cases
    first = {case.small: case for case in reversed(cases)}
    return list(reversed(first.values()))


def measure_case(case: KernelCase, situation: Situation, device: torch.device, timer: Timer) -> Row:
    work = case.small if situation.is_dry else case.work
    floor = work.floor
    row = Row(section=SECTION, name=case.title, shape=work.shape, tolerance=work.tolerance)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < work.least_capability:
        least = ".".join(map(str, work.least_capability))
        return replace(row, remark=f"not on this card: it takes compute capability {least}")
    torch.manual_seed(0)
    trial = work.make(device)
    error = trial.error()
    if not math.isfinite(error):
        return replace(row, failure=f"the difference to the plain computation is {error}")
    if not case.is_timed:
        return replace(row, error=error)
    seconds, rivals = _seconds(work, trial, device, timer)
    return replace(
        row,
        error=error,
        figure=seconds,
        unit="s",
        num_bytes=floor.num_bytes,
        flops=floor.flops,
        share=situation.share(floor, seconds),
        goal=case.goal,
        remark="; ".join(f"{name}: {show_figure(time_s, 's')}" for name, time_s in rivals.items()),
    )


def _seconds(work: Work, trial: Trial, device: torch.device, timer: Timer) -> tuple[float, dict[str, float]]:
    """Of the kernel, and of each rival."""
    trials = [trial, *(work.make(device) for _ in range(timer.num_sets(work.floor.num_bytes) - 1))]
    own = timer.seconds([each.launch for each in trials])
    return own, {name: timer.seconds([each.rivals[name] for each in trials]) for name in trial.rivals}
