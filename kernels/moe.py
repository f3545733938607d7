"""A feed-forward of many experts, each token going to those few that a router scores highest.

Shapes: hidden, residual and result [num_tokens, hidden_size]; router_logits [num_tokens, num_experts]; gate_up
[num_experts, 2 * size, hidden_size], gate first; down [num_experts, hidden_size, size]. A token's experts are weighted
by the softmax over all of them, or, where that is renormalised, over its own `top_k`, which is the softmax after the
choice; of equal scores the lower expert wins. The weighted results are added in the order of their scores.
Source: Shazeer et al. 2017, Outrageously Large Neural Networks, section 2; Jiang et al. 2024, Mixtral of Experts,
section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional

from kernels.silu_and_mul import silu_and_mul_reference


def moe_reference(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    top_k: int,
    is_renormalised: bool,
) -> torch.Tensor:
    """Plain torch, float32 inside, one expert after the other."""
    experts = router_logits.sort(stable=True, dim=-1, descending=True).indices[:, :top_k]
    weights = router_logits.float().softmax(-1).gather(1, experts)
    if is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    products = torch.empty(*experts.shape, hidden.shape[1], device=hidden.device)
    for expert in experts.unique().tolist():
        tokens, ranks = (experts == expert).nonzero(as_tuple=True)
        gated = silu_and_mul_reference(functional.linear(hidden[tokens].float(), gate_up[expert].float()))
        products[tokens, ranks] = functional.linear(gated, down[expert].float())
    combined = products.mul_(weights[..., None]).sum(1)
    return (combined if residual is None else combined.add_(residual)).to(hidden.dtype)


def moe(
    hidden: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    top_k: int,
    is_renormalised: bool,
    is_batch_invariant: bool = False,
) -> torch.Tensor:
    """Send each row of `hidden` through its `top_k` experts, plus `residual`; the caller owns the result.

    Args:
        is_batch_invariant: on a GPU, a row's result is the same to the bit whatever rows are beside it.
    """
    arguments = (hidden, router_logits, gate_up, down, residual)
    if hidden.is_cuda:
        from kernels.gpu.moe import INVARIANT_ROWS, moe_triton

        tile_rows = INVARIANT_ROWS if is_batch_invariant else None
        return moe_triton(*arguments, top_k=top_k, is_renormalised=is_renormalised, tile_rows=tile_rows)
    return moe_reference(*arguments, top_k=top_k, is_renormalised=is_renormalised)
