"""The feed-forward half of a layer: gate and up projections in one product, then down."""

from __future__ import annotations

from kernels.cpu.plan import AnyRows
from weir.engine.layers.linear import Linear
from weir.engine.models.decoder_config import DecoderConfig
from weir.engine.weights import Weights


class GatedMlp:
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, weights: Weights, name: str, config: DecoderConfig, size: int) -> None:
        hidden_size = config.hidden_size
        self._gate_up = Linear.load_stacked(
            weights,
            f"{name}.gate_up_proj",
            [f"{name}.gate_proj", f"{name}.up_proj"],
            [size, size],
            hidden_size,
            has_bias=config.mlp_bias,
            is_gated=True,
        )
        self._down = Linear.load(weights, f"{name}.down_proj", hidden_size, size, has_bias=config.mlp_bias)

    def __call__(self, hidden: AnyRows, residual: AnyRows | None = None) -> AnyRows:
        """Rows [num_tokens, hidden_size] to the same shape, plus `residual`."""
        return self._down(self._gate_up(hidden), residual)
