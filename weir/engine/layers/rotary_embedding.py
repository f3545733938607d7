"""Rotary position embedding: which angle every position turns every pair of a head's elements by.

The angles are a pure function of the position, never of the batch or of a sequence's length, so that chunked, cached
and moved KV are all the same KV. For the two scalings that transformers makes depend on the length ("dynamic",
"longrope") position p gets the frequencies of a sequence of p + 1 tokens: what transformers gives when it decodes
token by token.

Source: Su et al. 2021, RoFormer, section 3.2; Peng et al. 2023, YaRN, sections 3.1 to 3.4; Ding et al. 2024, LongRoPE,
section 3; Llama 3.1's published scaling; frequencies equal `transformers.modeling_rope_utils`.
"""

from __future__ import annotations

import math

import torch

from weir.engine.models.decoder_config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines of every position, computed once.

    Args:
        config: the scaling.
        num_positions: positions 0 to num_positions - 1 get a row.
        device: where the table lives.

    Attributes:
        cos_sin: [num_positions, rotary_dim] float32, cosines then sines.
    """

    def __init__(self, config: RopeConfig, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config, num_positions)
        scale = attention_factor(config)
        self.cos_sin = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)


def attention_factor(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by, so that attention keeps its temperature over a longer context."""
    if config.rope_type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    factor = _stretch(config)
    if config.rope_type == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(config.original_max_positions))
    if config.mscale and config.mscale_all_dim:
        return _mscale(factor, config.mscale) / _mscale(factor, config.mscale_all_dim)
    return _mscale(factor, 1.0)


def inverse_frequencies(config: RopeConfig, num_positions: int) -> torch.Tensor:
    """Radians a position: [1, rotary_dim / 2], or [num_positions, rotary_dim / 2] where the position matters."""
    base = _plain(config.theta, config.rotary_dim)
    match config.rope_type:
        case "linear":
            return (base / _stretch(config))[None]
        case "dynamic":
            return _dynamic(config, base, num_positions)
        case "yarn":
            return _yarn(config)[None]
        case "longrope":
            return _longrope(config, num_positions)
        case "llama3":
            return _llama3(config, base)[None]
        case "proportional":
            return _proportional(config, base)[None]
        case _:
            return base[None]


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _stretch(config: RopeConfig) -> float:
    return config.factor if config.factor is not None else config.max_positions / config.original_max_positions


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(config: RopeConfig, base: torch.Tensor, num_positions: int) -> torch.Tensor:
    """NTK-aware: the base grows with the length, once that exceeds the trained context."""
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float64).clamp_min(config.max_positions)
    factor, dim = _stretch(config), config.rotary_dim
    thetas = config.theta * (factor * lengths / config.max_positions - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    scaled = (1.0 / thetas[:, None] ** exponents).float()
    is_scaled = lengths > config.max_positions
    return torch.where(is_scaled[:, None], scaled, base)


def _yarn(config: RopeConfig) -> torch.Tensor:
    """Slow pairs are interpolated, fast ones kept, with a ramp between."""
    dim, theta = config.rotary_dim, config.theta

    def pair_with(num_rotations: float) -> float:
        turns = config.original_max_positions / (num_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (_stretch(config) * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _longrope(config: RopeConfig, num_positions: int) -> torch.Tensor:
    """Each pair has its own divisor, one set within the original context and one beyond."""
    wavelengths = config.theta ** (torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim)
    short = 1.0 / (torch.tensor(config.short_factors) * wavelengths)
    long = 1.0 / (torch.tensor(config.long_factors) * wavelengths)
    is_beyond = torch.arange(num_positions) >= config.original_max_positions
    return torch.where(is_beyond[:, None], long, short)


def _llama3(config: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, with a smooth band between."""
    factor, low, high = _stretch(config), config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / base
    smooth = (config.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    is_long = wavelengths > config.original_max_positions / low
    is_short = wavelengths < config.original_max_positions / high
    return torch.where(is_long, base / factor, torch.where(is_short, base, blended))


def _proportional(config: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Only the leading part of the pairs turns; the exponents still run over the whole head."""
    num_turning = int(config.rotary_fraction * config.rotary_dim // 2)
    is_turning = torch.arange(len(base)) < num_turning
    return torch.where(is_turning, base, torch.zeros(())) / _stretch(config)
