"""The attention half of a layer: fused projections, rotation, the paged cache, and the attention ops over it."""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows
from kernels.fp8_heads import DTYPE as FLOAT8
from kernels.paged_attention import paged_attention
from kernels.rotate_and_store import rotate_and_store
from weir.engine.batch import AnyBatch
from weir.engine.layers.linear import Linear
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.paged_kv_cache import LayerCache
from weir.engine.weights import Weights

_SCALE_NAMES = ("{0}.{1}_scale", "{0}.{1}_proj.{1}_scale", "{0}.{1}_proj.output_scale", "{0}.kv_scale")
"""As compressed-tensors, ModelOpt, earlier compressed-tensors and AutoFP8 name the scales of an fp8 cache."""


class Attention:
    """Grouped-query attention of one layer; writes the batch's keys and values before it reads."""

    def __init__(self, weights: Weights, name: str, config: DecoderConfig, sliding_window: int | None) -> None:
        head_dim = config.head_dim
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        self._sliding_window = sliding_window
        self._qkv = Linear.load_stacked(
            weights,
            f"{name}.qkv_proj",
            [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"],
            [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim],
            config.hidden_size,
            has_bias=config.qkv_bias,
        )
        self._output = Linear.load(
            weights, f"{name}.o_proj", config.hidden_size, num_heads * head_dim, has_bias=config.output_bias
        )
        self._eps = config.rms_norm_eps
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.has_qk_norm:
            q_norm = weights.take(f"{name}.q_norm.weight", head_dim)
            self._norms = (q_norm, weights.take(f"{name}.k_norm.weight", head_dim))
        self._kv_scales = torch.stack(
            [
                weights.take_scales([pattern.format(name, part) for pattern in _SCALE_NAMES], num_kv_heads)
                for part in ("k", "v")
            ]
        )

    def __call__(
        self, hidden: AnyRows, residual: AnyRows, cos_sin: torch.Tensor, batch: AnyBatch, cache: LayerCache
    ) -> AnyRows:
        """Rows [num_tokens, hidden_size] to the same shape, plus `residual`; `cos_sin` has all positions."""
        kv_scales = self._kv_scales if cache.keys.dtype == FLOAT8 else None
        rows = rotate_and_store(
            self._qkv(hidden),
            batch.positions,
            batch.slots,
            cos_sin,
            cache.keys,
            cache.values,
            self._norms,
            self._eps,
            kv_scales,
        )
        attended = paged_attention(
            rows,
            batch,
            cache.keys,
            cache.values,
            sliding_window=self._sliding_window,
            kv_scales=kv_scales,
            is_batch_invariant=self._qkv.is_batch_invariant,
        )
        return self._output(attended, residual)
