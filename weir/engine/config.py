"""What one engine is told at its start. Frozen; parsed by whoever starts the engine, handed down in one piece."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "fp8")
DEVICES = ("auto", "cpu", "cuda")
"""Or one GPU: `cuda:0`."""
TRANSFER_MEMORIES = ("none", "cuda_ipc", "nixl")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
DEFAULT_BATCHED_TOKENS = {"cpu": 256, "cuda": 8192}
"""Tokens of one step where none are set. On two CPU cores 256 keep a step of a small model under 1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model_dir: a prepared model directory (`weir.engine.prepare`).
        dtype: of weights and activations; auto is float32 on a CPU, the checkpoint's own on CUDA.
        kv_cache_dtype: auto is `dtype`, or float16 where a CPU has quantised weights; fp8 is for some GPUs.
        num_blocks: size of the KV pool; wins over `kv_cache_memory_bytes`.
        kv_cache_memory_bytes: memory of the KV pool; None is a share of what is free.
        host_kv_cache_bytes: host memory for blocks that the pool had to give up; 0 keeps none.
        disk_kv_cache_bytes: of a file in `disk_kv_cache_dir`, for those that host memory had to give up; 0 keeps none.
        device: auto is the emptiest GPU with room for `gpu_memory_utilization`, or a CPU where there is no GPU; cuda is
            never a CPU; cuda:N is that GPU, whoever else uses it.
        gpu_memory_utilization: on CUDA, the share of the device's memory that weights, activations and KV may take.
        device_claim_dir: where workers of one host write down which share of which GPU they take.
        batch_invariant: a sequence's tokens do not depend on what it is batched with; always so with the CPU kernels.
        cuda_graphs: record decode steps at the start and replay them.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of one step; None is `DEFAULT_BATCHED_TOKENS` of the device.
        max_model_len: longest sequence, prompt and output together; None is the model's own.
        quantization: of weights: auto keeps about the bits of the checkpoint, none makes them `dtype`; int8 and int4
            are for a checkpoint of floats, int4 on a CPU for one of four bits.
        num_threads: threads of a step on a CPU; None leaves it to torch.
        transfer_staging_bytes: host memory through which blocks on a device go to other workers or come from them.
        transfer_memory: how other workers read blocks on a device where they lie: none, cuda_ipc or nixl.
        compute_share: share of the time for steps, while sequences wait for KV from elsewhere; what is left is for the
            workers of the same cores that compute it.
        kernel_cache_dir: where compiled CPU kernels are kept; None computes with torch alone.

    Raises:
        ConfigError: names the field, its value and the limit.
    """

    model_dir: Path
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    host_kv_cache_bytes: int = 0
    disk_kv_cache_bytes: int = 0
    disk_kv_cache_dir: Path | None = None
    gpu_memory_utilization: float = 0.9
    device_claim_dir: Path = Path("~/.cache/weir/devices")
    cuda_graphs: bool = True
    batch_invariant: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    quantization: str = "none"
    num_threads: int | None = None
    transfer_staging_bytes: int = 64 << 20
    transfer_memory: str = "none"
    compute_share: float = 1.0
    kernel_cache_dir: Path | None = Path("~/.cache/weir/kernels")

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("quantization", QUANTIZATIONS),
            ("transfer_memory", TRANSFER_MEMORIES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}", param=name)
        if self.device not in DEVICES and not re.fullmatch(r"cuda:\d{1,3}", self.device):
            raise ConfigError(
                f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}, cuda:N", param="device"
            )
        for name in (
            "block_size",
            "num_blocks",
            "kv_cache_memory_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_threads",
            "transfer_staging_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1", param=name)
        for name in ("host_kv_cache_bytes", "disk_kv_cache_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 0", param=name)
        self._check_tiers()
        for name in ("gpu_memory_utilization", "compute_share"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} is {value}; it must be over 0 and at most 1", param=name)
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs, "
                f"{self.max_num_seqs}, or running sequences would starve each other",
                param="max_num_batched_tokens",
            )

    def _check_tiers(self) -> None:
        if self.host_kv_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_kv_cache_bytes is {self.host_kv_cache_bytes}; it must be 0 without enable_prefix_caching: "
                "blocks are found again by their content",
                param="host_kv_cache_bytes",
            )
        if self.disk_kv_cache_bytes and not self.host_kv_cache_bytes:
            raise ConfigError(
                f"disk_kv_cache_bytes is {self.disk_kv_cache_bytes}; with host_kv_cache_bytes 0 it must be 0: blocks "
                "reach the disk through host memory",
                param="disk_kv_cache_bytes",
            )
        if self.disk_kv_cache_bytes and self.disk_kv_cache_dir is None:
            raise ConfigError(
                f"disk_kv_cache_dir is not set; disk_kv_cache_bytes {self.disk_kv_cache_bytes} needs a directory",
                param="disk_kv_cache_dir",
            )

    def device_type(self) -> str:
        """`cpu` or `cuda`; auto is CUDA where torch sees a device."""
        if self.device != "auto":
            return self.device.partition(":")[0]
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def token_budget(self) -> int:
        """Most tokens of one step."""
        return self.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[self.device_type()], self.max_num_seqs)
