"""The one description of every model of the Llama family; what differs between them is in `DecoderConfig`.

Building it is loading it: each layer takes its tensors from `Weights` as it is made.

Source: Touvron et al. 2023, Llama 2; Jiang et al. 2023, Mistral 7B; Yang et al. 2024, Qwen2; Yang et al. 2025, Qwen3;
Jiang et al. 2024, Mixtral of Experts.
"""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows
from kernels.embedding import embedding
from weir.engine.batch import AnyBatch
from weir.engine.layers.attention import Attention
from weir.engine.layers.gated_mlp import GatedMlp
from weir.engine.layers.linear import Linear
from weir.engine.layers.rms_norm import RmsNorm
from weir.engine.layers.rotary_embedding import RotaryEmbedding
from weir.engine.layers.sparse_mlp import SparseMlp
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.paged_kv_cache import LayerCache, PagedKvCache
from weir.engine.weights import Weights

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Decoder:
    """A whole model: embedding, layers, norm, head.

    Args:
        config: its numbers.
        weights: where its tensors come from; all of them are taken.
        max_model_len: positions the rotation is made for.
        device: of the weights.

    Raises:
        ModelLoadError: a tensor is missing, of a wrong shape, or left over.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, max_model_len: int, device: torch.device) -> None:
        self.config = config
        self._embedding = weights.take_matrix(_EMBEDDING, config.vocab_size, config.hidden_size)
        self._layers = [_DecoderLayer(weights, config, index) for index in range(config.num_layers)]
        self._norm = RmsNorm(weights, "model.norm", config.hidden_size, config.rms_norm_eps)
        if config.is_tied:
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(weights.take_matrix(_HEAD, config.vocab_size, config.hidden_size))
        self._rotary = RotaryEmbedding(config.rope, max_model_len, device)
        weights.finish(allow_unused=(_HEAD,) if config.is_tied else ())

    def __call__(self, batch: AnyBatch, cache: PagedKvCache) -> AnyRows:
        """Compute the batch, writing its KV into `cache`: logits [num_logits, vocab_size]."""
        hidden = embedding(batch.input_ids, self._embedding)
        cos_sin = self._rotary.cos_sin
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, cos_sin, batch, cache.layer(index))
        return self._head(self._norm(hidden, batch.logits_indices))


class _DecoderLayer:
    """Attention, then feed-forward, each on the normalised sum of what came before and added to it."""

    def __init__(self, weights: Weights, config: DecoderConfig, index: int) -> None:
        name = f"model.layers.{index}"
        self._input_norm = RmsNorm(weights, f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self._attention = Attention(weights, f"{name}.self_attn", config, config.sliding_windows[index])
        self._post_norm = RmsNorm(weights, f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self._mlp: GatedMlp | SparseMlp
        if config.experts is not None and index in config.experts.layers:
            self._mlp = SparseMlp(weights, name, config, config.experts)
        else:
            self._mlp = GatedMlp(weights, f"{name}.mlp", config, config.intermediate_size)

    def __call__(self, hidden: AnyRows, cos_sin: torch.Tensor, batch: AnyBatch, cache: LayerCache) -> AnyRows:
        hidden = self._attention(self._input_norm(hidden), hidden, cos_sin, batch, cache)
        return self._mlp(self._post_norm(hidden), hidden)
