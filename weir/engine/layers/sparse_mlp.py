"""The feed-forward half of a layer that has experts: a router, the experts' matrices, and the expert for all."""

from __future__ import annotations

import torch

from kernels.cpu.plan import AnyRows
from kernels.moe import moe
from weir.engine.layers.gated_mlp import GatedMlp
from weir.engine.layers.linear import Linear
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.models.experts_config import ExpertsConfig
from weir.engine.weights import Weights


class SparseMlp:
    """Each token goes to its best experts, each of them a SwiGLU; see `kernels.moe`."""

    def __init__(self, weights: Weights, layer: str, config: DecoderConfig, experts: ExpertsConfig) -> None:
        hidden_size, size, num_experts = config.hidden_size, experts.intermediate_size, experts.num_experts
        is_mixtral = config.model_type == "mixtral"
        name = f"{layer}.block_sparse_moe" if is_mixtral else f"{layer}.mlp"
        gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        each = [f"{name}.experts.{expert}" for expert in range(num_experts)]
        self._experts = experts
        self._router = Linear.load(weights, f"{name}.gate", num_experts, hidden_size)
        self._gate_up = weights.take_stacked(
            f"{name}.experts.gate_up_proj.weight",
            [f"{expert}.{part}.weight" for expert in each for part in (gate, up)],
            [size] * 2 * num_experts,
            hidden_size,
        ).view(num_experts, 2 * size, hidden_size)
        self._down = weights.take_stacked(
            f"{name}.experts.down_proj.weight",
            [f"{expert}.{down}.weight" for expert in each],
            [hidden_size] * num_experts,
            size,
        ).view(num_experts, hidden_size, size)
        self._shared: tuple[GatedMlp, Linear] | None = None
        if experts.shared_size:
            shared = GatedMlp(weights, f"{name}.shared_expert", config, experts.shared_size)
            self._shared = (shared, Linear.load(weights, f"{name}.shared_expert_gate", 1, hidden_size))

    def __call__(self, hidden: AnyRows, residual: AnyRows) -> AnyRows:
        """Rows [num_tokens, hidden_size] to the same shape, plus `residual`."""
        logits = self._router(hidden)
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(residual, torch.Tensor)
        assert isinstance(logits, torch.Tensor)
        if self._shared is not None:
            shared, gate = (layer(hidden) for layer in self._shared)
            assert isinstance(shared, torch.Tensor)
            assert isinstance(gate, torch.Tensor)
            residual = residual + gate.sigmoid() * shared
        return moe(
            hidden,
            logits,
            self._gate_up,
            self._down,
            residual,
            top_k=self._experts.top_k,
            is_renormalised=self._experts.is_renormalised,
            is_batch_invariant=self._router.is_batch_invariant,
        )
