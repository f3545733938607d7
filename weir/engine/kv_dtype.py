"""Which dtype the KV cache has: what the setting asks for, where the device can compute with it."""

from __future__ import annotations

import torch

from weir.core.errors import ConfigError

FP8 = "float8_e4m3fn"
_FP8_CAPABILITY = (8, 9)
"""The first that converts e4m3 in hardware: Ada, then Hopper."""


def choose_kv_dtype(setting: str, *, default: str, capability: tuple[int, int] | None) -> str:
    """The `kv_dtype` of a `KvLayout`.

    Args:
        setting: `EngineConfig.kv_cache_dtype`.
        default: what auto is.
        capability: of an NVIDIA GPU; None for any other device.

    Raises:
        ConfigError: fp8 on a device without it.
    """
    if setting != "fp8":
        return default if setting == "auto" else setting
    if capability is None or capability < _FP8_CAPABILITY:
        found = "here is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        raise ConfigError(
            f"kv_cache_dtype is 'fp8'; it needs an NVIDIA GPU of compute capability 8.9 or more, and {found}: float32, "
            f"float16, bfloat16 and int8 are possible",
            param="kv_cache_dtype",
        )
    return FP8


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of `device`, or None where it is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)
