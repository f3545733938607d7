"""The numbers that make one decoder-only model of the Llama family out of the general description.

`DecoderConfig.from_hf` is the only reader of a Hugging Face config.json: every default that transformers has for a
model type is written down here once, so that nothing below needs transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weir.core.errors import ModelLoadError
from weir.engine.models.experts_config import MOE_MODEL_TYPES, ExpertsConfig

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *MOE_MODEL_TYPES)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "mixtral": 131072} | dict.fromkeys(
    ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), 32768
)
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}
_DEFAULT_THETA = {"mixtral": 1_000_000.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become rotations.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the wavelengths.
        rotary_dim: leading elements of a head that are rotated.
        rotary_fraction: the same as a part of the head; "proportional" keeps the rest in place by zero frequencies.
        max_positions: the model's own `max_position_embeddings`.
        original_max_positions: context of the pretraining, before scaling.
        factor: how many times the context was stretched; None where the type derives it.
        attention_factor: multiplies cosines and sines; None where the type derives it.
        short_factors, long_factors: divisors of each frequency within and beyond the original context (longrope).
    """

    rope_type: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_max_positions: int
    rotary_fraction: float = 1.0
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One model of the family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE.

    Attributes:
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
        has_qk_norm: queries and keys are RMS-normalised head by head before they are rotated.
        is_tied: the head's weight is the embedding's.
        experts: of the layers that have them; None where every layer has one feed-forward.
        sliding_windows: one entry a layer: how many tokens, itself included, a token attends to; None for all.
        max_model_len: longest sequence that positions are defined for.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    experts: ExpertsConfig | None
    sliding_windows: tuple[int | None, ...]
    rope: RopeConfig
    max_model_len: int

    @classmethod
    def load(cls, model_dir: Path) -> DecoderConfig:
        """Read `config.json` of a model directory.

        Raises:
            ModelLoadError: missing, not JSON, or describing a model that is not of this family; names the file.
        """
        path = model_dir / "config.json"
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError as exc:
            raise ModelLoadError(f"{path}: missing; a model directory needs its config.json") from exc
        except ValueError as exc:
            raise ModelLoadError(f"{path}: not JSON: {exc}") from exc
        try:
            return cls.from_hf(fields)
        except ModelLoadError as exc:
            raise ModelLoadError(f"{path}: {exc.message}") from exc

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> DecoderConfig:
        """Read the fields of a Hugging Face config.json.

        Raises:
            ModelLoadError: a field is missing, has an impossible value, or the model is not of this family.
        """
        model_type = str(fields.get("model_type"))
        if model_type not in SUPPORTED_MODEL_TYPES:
            supported = ", ".join(SUPPORTED_MODEL_TYPES)
            raise ModelLoadError(f"model_type {model_type!r} is not supported; supported are {supported}")
        try:
            return cls._from_supported(model_type, fields)
        except KeyError as exc:
            raise ModelLoadError(f"field {exc.args[0]!r} is missing") from exc
        except (TypeError, ValueError) as exc:
            raise ModelLoadError(f"a field has an impossible value: {exc}") from exc

    @classmethod
    def _from_supported(cls, model_type: str, fields: Mapping[str, Any]) -> DecoderConfig:
        hidden_size = int(fields["hidden_size"])
        num_heads = int(fields["num_attention_heads"])
        num_layers = int(fields["num_hidden_layers"])
        num_kv_heads = int(fields.get("num_key_value_heads") or _DEFAULT_KV_HEADS.get(model_type, num_heads))
        default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
        head_dim = int(fields.get("head_dim") or default_head_dim)
        hidden_act = str(fields.get("hidden_act") or "silu")
        has_bias = bool(fields.get("attention_bias", False)) and model_type in ("llama", "qwen3", "qwen3_moe")
        has_moe_bias = bool(fields.get("qkv_bias", True)) and model_type == "qwen2_moe"
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if hidden_act not in ("silu", "swish"):
            raise ModelLoadError(f"hidden_act {hidden_act!r} is not supported; supported is silu")
        if head_dim % 2:
            raise ModelLoadError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
        rope = _rope_config(model_type, fields, head_dim)
        return cls(
            model_type=model_type,
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6)),
            hidden_act="silu",
            qkv_bias=has_bias or model_type == "qwen2" or has_moe_bias,
            output_bias=has_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)) and model_type == "llama",
            has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            experts=ExpertsConfig.from_hf(model_type, fields, num_layers),
            sliding_windows=_sliding_windows(model_type, fields, num_layers),
            rope=rope,
            max_model_len=_max_model_len(rope),
        )

    def to_json(self) -> str:
        """A canonical form: equal text means that equal weights compute the same."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def _sliding_windows(model_type: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Which layers look back how far; each model type has its own way of saying it."""
    if model_type == "llama":
        return (None,) * num_layers
    window = fields.get("sliding_window", None if model_type == "mixtral" else 4096)
    is_used = model_type in ("mistral", "mixtral") or fields.get("use_sliding_window", False)
    if not is_used or window is None:
        return (None,) * num_layers
    if model_type in ("mistral", "mixtral", "qwen3_moe"):
        return (int(window),) * num_layers
    if model_type == "qwen2_moe":
        raise ModelLoadError("use_sliding_window is not supported for model_type 'qwen2_moe'")
    first_layer = int(fields.get("max_window_layers", 28))
    layer_types = fields.get("layer_types") or [
        "sliding_attention" if layer >= first_layer else "full_attention" for layer in range(num_layers)
    ]
    if len(layer_types) != num_layers:
        raise ModelLoadError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def _rope_config(model_type: str, fields: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling: dict[str, Any] = dict(fields.get("rope_scaling") or {})
    scaling.update(fields.get("rope_parameters") or {})
    rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    theta = scaling.get("rope_theta", fields.get("rope_theta"))
    partial = float(scaling.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0)
    max_positions = int(fields.get("max_position_embeddings") or _DEFAULT_MAX_POSITIONS[model_type])
    original = fields.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * partial)
    required: dict[str, tuple[str, ...]] = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    missing = [name for name in required.get(rope_type, ()) if scaling.get(name) is None]
    if missing:
        raise ModelLoadError(f"rope type {rope_type!r} needs {missing[0]!r}")
    short, long = (tuple(float(f) for f in scaling.get(name) or ()) for name in ("short_factor", "long_factor"))
    if rope_type == "longrope" and not len(short) == len(long) == rotary_dim // 2:
        raise ModelLoadError(
            f"rope type 'longrope' needs {rotary_dim // 2} factors, got {len(short)} short and {len(long)} long"
        )
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta if theta is not None else _DEFAULT_THETA.get(model_type, 10_000.0)),
        rotary_dim=rotary_dim,
        max_positions=max_positions,
        original_max_positions=int(original or max_positions),
        rotary_fraction=partial,
        factor=_optional_float(scaling.get("factor")),
        attention_factor=_optional_float(scaling.get("attention_factor")),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=_optional_float(scaling.get("mscale")),
        mscale_all_dim=_optional_float(scaling.get("mscale_all_dim")),
        truncate=bool(scaling.get("truncate", True)),
        short_factors=short,
        long_factors=long,
    )


def _max_model_len(rope: RopeConfig) -> int:
    """Positions the scaling makes usable: config.json gives the unscaled count for some types only."""
    factor = rope.factor or 1.0
    if rope.rope_type in ("linear", "dynamic"):
        return int(rope.max_positions * factor)
    if rope.rope_type == "yarn":
        return max(rope.max_positions, int(rope.original_max_positions * factor))
    return rope.max_positions


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
