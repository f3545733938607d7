"""The device a worker computes on: chosen among the host's GPUs, and what of its memory is left for KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weir.core.errors import ConfigError
from weir.engine.config import EngineConfig
from weir.engine.device_claim import DeviceClaim, DeviceLedger

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


def cuda_names() -> list[str]:
    """A name for each GPU that torch sees, the same in every process of the host."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class Device:
    """Where to compute, and the claim on it; a CPU needs none."""

    torch_device: torch.device
    claim: DeviceClaim | None = None

    @classmethod
    def choose(cls, config: EngineConfig, find_names: Callable[[], Sequence[str]] = cuda_names) -> Device:
        """`auto` takes the emptiest GPU that has room, or a CPU where there is no GPU; `cuda` a GPU or none.

        Raises:
            ConfigError: a GPU that is not there, or none with `gpu_memory_utilization` of its memory unclaimed.
        """
        if config.device == "cpu":
            return cls(CPU)
        names = find_names()
        if not names:
            if config.device == "auto":
                return cls(CPU)
            raise ConfigError(
                f"device is {config.device!r}; torch sees no CUDA device: auto and cpu are possible", param="device"
            )
        try:
            return cls._claim(config, names)
        except OSError as exc:
            raise ConfigError(
                f"device_claim_dir: no claim can be written in {config.device_claim_dir}: {exc.strerror}",
                param="device_claim_dir",
            ) from exc

    @classmethod
    def _claim(cls, config: EngineConfig, names: Sequence[str]) -> Device:
        share = config.gpu_memory_utilization
        ledger = DeviceLedger(config.device_claim_dir.expanduser())
        if ":" in config.device:
            index = int(config.device.partition(":")[2])
            if index >= len(names):
                raise ConfigError(f"device is {config.device!r}; torch sees {len(names)} CUDA devices", param="device")
            return cls(torch.device("cuda", index), ledger.claim(names[index], share))
        claim = ledger.claim_emptiest(names, share)
        if claim is None:
            claimed = ledger.claimed()
            taken = ", ".join(f"cuda:{index} {claimed.get(name, 0.0):g}" for index, name in enumerate(names))
            raise ConfigError(
                f"device is {config.device!r} and no GPU of this host has {share:g} of its memory unclaimed by other "
                f"workers (claimed: {taken}): lower gpu_memory_utilization of all of them, or name a device",
                param="device",
            )
        return cls(torch.device("cuda", names.index(claim.name)), claim)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """A device's memory at one moment, in bytes.

    Attributes:
        reserved: by this process's torch.
        peak_reserved: most of it so far.
    """

    total: int
    free: int
    reserved: int
    peak_reserved: int

    @classmethod
    def of(cls, device: torch.device) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            peak_reserved=torch.cuda.max_memory_reserved(device),
        )


def kv_bytes(before: MemoryReading, after: MemoryReading, utilization: float) -> int:
    """Bytes left for KV of `utilization` of a device's memory, at least 0.

    Args:
        before: when nothing was loaded.
        after: when the weights were there and the largest step had been computed.

    Raises:
        ConfigError: other processes had taken what this one is to have.
    """
    budget = int(before.total * utilization)
    spare = before.free + before.reserved - budget
    if spare < 0:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} is {budget >> 20} MiB of the device; only "
            f"{(before.free + before.reserved) >> 20} of {before.total >> 20} MiB are free of other processes",
            param="gpu_memory_utilization",
        )
    # What is free now, less what the largest step takes again and what is not ours. So what libraries took beside torch
    # is counted, and whatever others took meanwhile.
    return max(0, after.free - (after.peak_reserved - after.reserved) - spare)
