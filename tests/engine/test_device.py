from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weir.core.errors import ConfigError
from weir.engine.config import EngineConfig
from weir.engine.device import Device, MemoryReading, kv_bytes

GIB = 1 << 30


def config(tmp_path: Path, device: str, share: float = 0.9) -> EngineConfig:
    return EngineConfig(
        model_dir=tmp_path, device=device, gpu_memory_utilization=share, device_claim_dir=tmp_path / "devices"
    )


def test_auto_takes_one_gpu_after_the_other_and_then_none(tmp_path: Path) -> None:
    def names() -> list[str]:
        return ["GPU-1", "GPU-2"]

    found = [Device.choose(config(tmp_path, device), names).torch_device for device in ("auto", "cuda")]
    assert found == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match=r"no GPU of this host has 0.9 .*cuda:0 0.9, cuda:1 0.9") as caught:
        Device.choose(config(tmp_path, "auto"), names)
    assert caught.value.param == "device"
    shared = Device.choose(config(tmp_path, "cuda:0"), names)
    assert shared.torch_device == torch.device("cuda", 0)


def test_two_workers_of_half_a_gpu_share_it(tmp_path: Path) -> None:
    found = [Device.choose(config(tmp_path, "auto", 0.5), lambda: ["GPU-1"]).torch_device.index for _ in range(2)]
    assert found == [0, 0]


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(tmp_path: Path) -> None:
    assert Device.choose(config(tmp_path, "auto"), list).torch_device.type == "cpu"
    assert Device.choose(config(tmp_path, "cpu"), lambda: ["GPU-1"]).torch_device.type == "cpu"
    with pytest.raises(ConfigError, match="device is 'cuda'; torch sees no CUDA device"):
        Device.choose(config(tmp_path, "cuda"), list)
    with pytest.raises(ConfigError, match="'cuda:3'; torch sees 1 CUDA devices"):
        Device.choose(config(tmp_path, "cuda:3"), lambda: ["GPU-1"])


def test_a_ledger_that_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"device_claim_dir: no claim can be written in .*file") as caught:
        Device.choose(config(tmp_path / "file", "auto"), lambda: ["GPU-1"])
    assert caught.value.param == "device_claim_dir"


def reading(*, free: int, reserved: int, peak: int) -> MemoryReading:
    return MemoryReading(total=80 * GIB, free=free * GIB, reserved=reserved * GIB, peak_reserved=peak * GIB)


def test_kv_gets_what_weights_and_the_largest_step_leave_of_the_share() -> None:
    before = reading(free=79, reserved=0, peak=0)
    # 16 of weights, 4 of a step, 1 that libraries took beside torch.
    after = reading(free=79 - 21, reserved=20, peak=20)
    assert kv_bytes(before, after, 0.5) == (40 - 20 - 1) * GIB


def test_kv_never_gets_what_is_not_free() -> None:
    before = reading(free=79, reserved=0, peak=0)
    after = reading(free=10, reserved=16, peak=20)  # somebody else came meanwhile
    assert kv_bytes(before, after, 0.95) == (10 - 4 - 3) * GIB


def test_weights_that_leave_nothing_leave_nothing() -> None:
    assert kv_bytes(reading(free=79, reserved=0, peak=0), reading(free=1, reserved=78, peak=78), 0.9) == 0


def test_a_share_that_others_have_taken_is_refused_by_name() -> None:
    before = reading(free=40, reserved=0, peak=0)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization 0.9 is 73728 MiB .* only 40960 of 81920 MiB"
    ) as caught:
        kv_bytes(before, before, 0.9)
    assert caught.value.param == "gpu_memory_utilization"
