"""The attention half of a layer: fused projections, rotation, the paged cache, and the attention ops over it."""

from __future__ import annotations

import torch

from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from kernels.rotary_embedding import rotary_embedding
from kernels.store_kv_cache import store_kv_cache
from weir.engine.batch import Batch
from weir.engine.layers.linear import Linear
from weir.engine.layers.rms_norm import RmsNorm
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.paged_kv_cache import LayerCache
from weir.engine.weights import Weights


class Attention:
    """Grouped-query attention of one layer; writes the batch's keys and values before it reads."""

    def __init__(self, weights: Weights, name: str, config: DecoderConfig, sliding_window: int | None) -> None:
        head_dim = config.head_dim
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
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
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.has_qk_norm:
            q_norm = RmsNorm(weights, f"{name}.q_norm", head_dim, config.rms_norm_eps)
            self._norms = (q_norm, RmsNorm(weights, f"{name}.k_norm", head_dim, config.rms_norm_eps))

    def __call__(self, hidden: torch.Tensor, cos_sin: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """Rows [num_tokens, hidden_size] to the same shape; `cos_sin` as `RotaryEmbedding` gives it."""
        heads = self._qkv(hidden).view(-1, self._num_heads + 2 * self._num_kv_heads, self._head_dim)
        first_value = self._num_heads + self._num_kv_heads
        query, key, value = heads.tensor_split((self._num_heads, first_value), dim=1)
        if self._norms is not None:
            query.copy_(self._norms[0](query))
            key.copy_(self._norms[1](key))
        rotary_embedding(heads[:, :first_value], cos_sin)
        store_kv_cache(key, value, cache.keys, cache.values, batch.slots)
        return self._output(self._attend(query, batch, cache).flatten(1))

    def _attend(self, query: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """Decoding sequences, which come first in the batch, and the others each go through their own op."""
        scale = self._head_dim**-0.5
        num_decodes = batch.num_decodes
        parts = []
        if num_decodes:
            parts.append(
                decode_attention(
                    query[:num_decodes],
                    cache.keys,
                    cache.values,
                    batch.block_tables[:num_decodes],
                    batch.seq_lens[:num_decodes],
                    scale=scale,
                    sliding_window=self._sliding_window,
                )
            )
        if num_decodes < batch.num_seqs:
            parts.append(
                prefill_attention(
                    query[num_decodes:],
                    cache.keys,
                    cache.values,
                    batch.block_tables[num_decodes:],
                    batch.cu_seqlens_q[num_decodes:] - num_decodes,
                    batch.seq_lens[num_decodes:],
                    scale=scale,
                    sliding_window=self._sliding_window,
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
