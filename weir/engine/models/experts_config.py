"""The numbers of a mixture of experts, and how each model type spells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weir.core.errors import ModelLoadError

MOE_MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Which layers have experts in place of one feed-forward, and how tokens are shared out among them.

    Attributes:
        layers: their numbers.
        top_k: experts that a token goes to.
        is_renormalised: the weights of a token's experts sum to one.
        shared_size: of one more expert, which every token goes to; 0 where there is none.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    is_renormalised: bool
    shared_size: int

    @classmethod
    def from_hf(cls, model_type: str, fields: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
        """Read the fields of a Hugging Face config.json; None where no layer has experts.

        Raises:
            ModelLoadError: a number that makes no sense.
            KeyError: a field is missing.
        """
        if model_type not in MOE_MODEL_TYPES:
            return None
        is_mixtral = model_type == "mixtral"
        num_experts = int(fields["num_local_experts"] if is_mixtral else fields["num_experts"])
        top_k = int(fields["num_experts_per_tok"])
        layers = tuple(range(num_layers)) if is_mixtral else _sparse_layers(fields, num_layers)
        if not num_experts or not layers:
            return None
        if not 1 <= top_k <= num_experts:
            raise ModelLoadError(f"num_experts_per_tok is {top_k} of {num_experts} experts")
        return cls(
            layers=layers,
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=int(fields["intermediate_size" if is_mixtral else "moe_intermediate_size"]),
            is_renormalised=is_mixtral or bool(fields.get("norm_topk_prob", False)),
            shared_size=int(fields["shared_expert_intermediate_size"]) if model_type == "qwen2_moe" else 0,
        )


def _sparse_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Every `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    step = int(fields.get("decoder_sparse_step", 1))
    if step < 1:
        raise ModelLoadError(f"decoder_sparse_step is {step}; the least is 1")
    dense = {int(layer) for layer in fields.get("mlp_only_layers") or ()}
    return tuple(layer for layer in range(step - 1, num_layers, step) if layer not in dense)
