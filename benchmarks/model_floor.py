"""What a step of a model does at least, from its configuration. Weights and cache are of two bytes an element."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.floor import Floor
from weir.engine.models.decoder_config import DecoderConfig

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelFloor:
    """Of one model; norms, rotations and the rows of an embedding are left out, which is under a thousandth."""

    config: DecoderConfig

    def decode(self, num_seqs: int, context: int) -> Floor:
        """One new token for each of `num_seqs` sequences, the last of `context` tokens."""
        config = self.config
        elements = self._layer_elements(num_seqs) * config.num_layers + self._head_elements
        kv_elements = num_seqs * context * 2 * config.num_kv_heads * config.head_dim * config.num_layers
        in_attention = 4 * num_seqs * context * config.num_heads * config.head_dim * config.num_layers
        return Floor(
            num_bytes=(elements + kv_elements) * ELEMENT_BYTES,
            flops=2 * num_seqs * (self._products_a_token + self._head_elements) + in_attention,
        )

    def prefill(self, num_tokens: int) -> Floor:
        """All tokens of one prompt, and the logits of its last."""
        config = self.config
        elements = self._layer_elements(num_tokens) * config.num_layers + self._head_elements
        kv_elements = num_tokens * 2 * config.num_kv_heads * config.head_dim * config.num_layers
        pairs = num_tokens * (num_tokens + 1) // 2
        in_attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
        return Floor(
            num_bytes=(elements + kv_elements) * ELEMENT_BYTES,
            flops=2 * (num_tokens * self._products_a_token + self._head_elements) + in_attention,
        )

    def num_experts_met(self, num_tokens: int) -> float:
        """Experts of a layer that tokens go to, where each is as likely as the others; 0 without experts."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        return experts.num_experts * (1 - (1 - experts.top_k / experts.num_experts) ** num_tokens)

    @property
    def _head_elements(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def _attention_elements(self) -> int:
        """Of the projections of one layer."""
        config = self.config
        return config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)

    def _layer_elements(self, num_tokens: int) -> int:
        """Weights of one layer that so many tokens read; every layer has experts, or none has."""
        config, experts = self.config, self.config.experts
        if experts is None:
            return self._attention_elements + 3 * config.hidden_size * config.intermediate_size
        in_experts = self.num_experts_met(num_tokens) * 3 * config.hidden_size * experts.intermediate_size
        return self._attention_elements + config.hidden_size * experts.num_experts + round(in_experts)

    @property
    def _products_a_token(self) -> int:
        """Multiply-adds of one token with the weights of all layers."""
        config, experts = self.config, self.config.experts
        if experts is None:
            return self._layer_elements(1) * config.num_layers
        in_experts = 3 * experts.top_k * config.hidden_size * experts.intermediate_size
        router = config.hidden_size * experts.num_experts
        return (self._attention_elements + router + in_experts) * config.num_layers
