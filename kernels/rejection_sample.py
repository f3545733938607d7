"""Verify drafts of the next tokens: how many are accepted, and the one token that is drawn behind them.

Shapes: draft_token_ids [num_seqs, num_drafts] int64, -1 from where a sequence has no more; draft_probs [num_seqs,
num_drafts, vocab_size] float32, from which each was drawn, or None where a drafter does not draw; logits [num_seqs *
(num_drafts + 1), vocab_size] float32, of which a sequence's row j scores the token at the place of its draft j; a
`Draw` for each of these rows, in their order.

Tokens come out as often as if each had been drawn from its logits. Without draft_probs each row is drawn as `sample`
does, and a draft is accepted if it is the token drawn; so the tokens are those that drawing one by one gives. With
them a draft is accepted with probability p / q, p being the softmax of logits / temperature, and in place of the first
that is not, a token is drawn from max(p - q, 0); behind the last draft one is drawn as `sample` does. Their random
numbers are those of `Purpose.ACCEPTANCE` and `Purpose.RECOVERY`, so a drafter may draw with those of `Purpose.TOKEN`.
Where the temperature is 0 a draft is accepted if it is the best token.
Source: Leviathan et al. 2023, Fast inference from transformers via speculative decoding; Chen et al. 2023, Accelerating
large language model decoding with speculative sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.host_copy import to_device
from kernels.noise import Purpose, gumbel
from kernels.sample import Draw, sample, sample_reference

LEAST_SHARE = 2.0**-60
"""Of p, what a token keeps of it in the distribution that replaces a draft: where rounding takes all, p is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What came of the drafts.

    Attributes:
        token_ids: [num_seqs, num_drafts + 1] int64: the accepted drafts, the token behind them (-1 where its row is not
            finite), then -1.
        num_accepted: [num_seqs] int64.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor


def rejection_sample_reference(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor | None, logits: torch.Tensor, draws: Sequence[Draw]
) -> Verified:
    """Plain torch, float64 inside."""
    drawn = sample_reference(logits, draws).view(len(draft_token_ids), -1)
    if draft_probs is None:
        return _verify(draft_token_ids, drawn[:, :-1] == draft_token_ids, drawn)
    device, vocab_size = logits.device, logits.shape[1]
    shape = (*drawn.shape, vocab_size)
    greedy = torch.tensor([draw.is_greedy for draw in draws], device=device).view(drawn.shape)[:, :-1]
    temperatures = torch.tensor([1.0 if draw.is_greedy else draw.temperature for draw in draws], device=device)
    scaled = logits.double() / temperatures.double()[:, None]
    probs = torch.softmax(scaled, dim=1).view(shape)[:, :-1]
    drafts = draft_token_ids.clamp(min=0)[:, :, None]
    numbers = _uniforms(draws, 1, Purpose.ACCEPTANCE, device).view(drawn.shape)[:, :-1]
    is_likely = numbers * draft_probs.gather(2, drafts)[:, :, 0] < probs.gather(2, drafts)[:, :, 0]
    is_accepted = torch.where(greedy, drawn[:, :-1] == draft_token_ids, is_likely)

    rest = torch.maximum(probs - draft_probs, probs * LEAST_SHARE)
    noise = gumbel(_uniforms(draws, vocab_size, Purpose.RECOVERY, device)).view(shape)[:, :-1]
    is_replaced = ~greedy & (draft_token_ids >= 0) & (drawn[:, :-1] >= 0)
    drawn[:, :-1] = torch.where(is_replaced, (rest.log() + noise).argmax(dim=2), drawn[:, :-1])
    return _verify(draft_token_ids, is_accepted, drawn)


def _uniforms(draws: Sequence[Draw], num_tokens: int, purpose: Purpose, device: torch.device) -> torch.Tensor:
    return torch.stack([draw.noise_key(purpose).uniforms(num_tokens, device) for draw in draws])


def _verify(draft_token_ids: torch.Tensor, is_accepted: torch.Tensor, drawn: torch.Tensor) -> Verified:
    """Drafts up to the first that is not accepted, then what was drawn at its place; all are [num_seqs, ...]."""
    num_accepted = (is_accepted & (draft_token_ids >= 0)).long().cumprod(dim=1).sum(dim=1)
    places = torch.arange(drawn.shape[1], device=drawn.device)
    drafts = torch.nn.functional.pad(draft_token_ids, (0, 1), value=-1)
    last = torch.where(places == num_accepted[:, None], drawn, -1)
    return Verified(token_ids=torch.where(places < num_accepted[:, None], drafts, last), num_accepted=num_accepted)


def rejection_sample(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor | None, logits: torch.Tensor, draws: Sequence[Draw]
) -> Verified:
    """Verify the drafts of all sequences, at least one; nothing here waits for a GPU. Where there are draft_probs no
    draw may be truncated: what both distributions leave out is masked in them."""
    assert len(draws) == len(logits) == draft_token_ids.numel() + len(draft_token_ids)
    if draft_probs is None:
        drawn = sample(logits, draws).token_ids.view(len(draft_token_ids), -1)
        return _verify(draft_token_ids, drawn[:, :-1] == draft_token_ids, drawn)
    assert not any(draw.is_truncated(logits.shape[1]) for draw in draws)
    if logits.is_cuda:
        from kernels.gpu.rejection_sample import rejection_sample_triton
        from kernels.gpu.sample import pack_draws

        words = to_device(pack_draws(draws, logits.shape[1]), logits.device)
        token_ids, num_accepted = rejection_sample_triton(draft_token_ids, draft_probs, logits, words)
        return Verified(token_ids=token_ids, num_accepted=num_accepted)
    return rejection_sample_reference(draft_token_ids, draft_probs, logits, draws)
