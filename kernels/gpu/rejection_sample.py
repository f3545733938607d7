"""See `kernels.rejection_sample`, with draft_probs. Several programs find the sum of the weights of each row; one a
sequence walks its drafts up to the first that is not accepted; then several draw from that one row, and one a sequence
compares their winners.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.noise import gumbel, noise_words, tokens_of, uniform
from kernels.gpu.sample import NUM_WORDS, PIECE
from kernels.noise import Purpose
from kernels.rejection_sample import LEAST_SHARE

TOKEN = tl.constexpr(int(Purpose.TOKEN))
ACCEPTANCE = tl.constexpr(int(Purpose.ACCEPTANCE))
RECOVERY = tl.constexpr(int(Purpose.RECOVERY))
OPTIONS = {"num_warps": 8}


@triton.jit
def _temperature(words_ptr):
    """Of a draw; 1 and False where it takes the best token."""
    temperature = tl.load(words_ptr + 6).to(tl.float32, bitcast=True)
    return tl.where(temperature > 0, temperature, 1.0), temperature > 0


@triton.jit
def _sum_weights_kernel(
    logits_ptr, draws_ptr, bests_ptr, sums_ptr, tokens_ptr, row_stride, vocab_size, N: tl.constexpr
):
    """One piece of a row: its best score and the first token that has it, and the sum of weights against it."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = _temperature(draws_ptr + row * NUM_WORDS)
    tokens = piece * N + tl.arange(0, N)
    logit = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    is_wrong = (logit != logit) | (logit == float("inf"))
    best = tl.where(tl.max(is_wrong.to(tl.int32), 0) > 0, float("inf"), tl.max(logit, 0))
    reference = tl.where(tl.abs(best) == float("inf"), 0.0, best)
    place = row * tl.num_programs(1) + piece
    tl.store(bests_ptr + place, best)
    tl.store(sums_ptr + place, tl.sum(tl.exp((logit - reference) / temperature), 0))
    tl.store(tokens_ptr + place, tl.min(tl.where(logit == best, tokens, vocab_size), 0))


@triton.jit
def _accept_kernel(
    drafts_ptr,
    draft_probs_ptr,
    logits_ptr,
    draws_ptr,
    bests_ptr,
    sums_ptr,
    tokens_ptr,
    token_ids_ptr,
    num_accepted_ptr,
    normalizers_ptr,
    row_stride,
    vocab_size,
    num_drafts,
    num_pieces,
    P: tl.constexpr,
):
    """The drafts of one sequence. Of the row from which its last token comes, the best score and the sum of weights."""
    sequence = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, P)
    is_piece = pieces < num_pieces
    num_accepted = 0
    is_accepted = sequence >= 0
    for index in range(0, num_drafts + 1):
        row = sequence * (num_drafts + 1) + index
        if is_accepted:
            words_ptr = draws_ptr + row * NUM_WORDS
            temperature, is_random = _temperature(words_ptr)
            bests = tl.load(bests_ptr + row * num_pieces + pieces, mask=is_piece, other=float("-inf"))
            best = tl.max(bests, 0)
            is_finite = tl.abs(best) < float("inf")
            best = tl.where(is_finite, best, 0.0)
            sums = tl.load(sums_ptr + row * num_pieces + pieces, mask=is_piece, other=0.0)
            total = tl.sum(sums * tl.exp((tl.where(is_finite, bests, 0.0) - best) / temperature), 0)
            total = tl.where(is_finite, total, 1.0)
            tl.store(normalizers_ptr + sequence * 2, tl.where(is_finite, best, float("inf")))
            tl.store(normalizers_ptr + sequence * 2 + 1, total)
            has_draft = index < num_drafts
            draft = tl.load(drafts_ptr + sequence * num_drafts + index, mask=has_draft, other=-1)
            has_draft &= (draft >= 0) & is_finite
            logit = tl.load(logits_ptr + row * row_stride + draft, mask=has_draft, other=0.0)
            place = (sequence * num_drafts + index) * vocab_size + draft
            draft_prob = tl.load(draft_probs_ptr + place, mask=has_draft, other=0.0)
            blocks = tl.arange(0, 1)
            noise = noise_words(
                tl.load(words_ptr + 1),
                tl.load(words_ptr + 2),
                tl.load(words_ptr + 3),
                tl.load(words_ptr + 4),
                blocks,
                ACCEPTANCE,
            )
            number = tl.max(uniform(noise[0]), 0)
            is_likely = number * draft_prob * total < tl.exp(tl.where(has_draft, logit - best, 0.0) / temperature)
            tokens = tl.load(tokens_ptr + row * num_pieces + pieces, mask=is_piece, other=0)
            token = tl.min(tl.where(is_piece & (bests == best), tokens, vocab_size), 0)
            is_accepted = has_draft & tl.where(is_random, is_likely, draft == token)
            num_accepted += is_accepted.to(tl.int32)
            tl.store(token_ids_ptr + row, tl.where(is_accepted, draft, -1))
        else:
            tl.store(token_ids_ptr + row, -1)
    tl.store(num_accepted_ptr + sequence, num_accepted)


@triton.jit
def _recover_kernel(
    drafts_ptr,
    draft_probs_ptr,
    logits_ptr,
    draws_ptr,
    num_accepted_ptr,
    normalizers_ptr,
    leads_ptr,
    tokens_ptr,
    row_stride,
    vocab_size,
    num_drafts,
    LEAST_SHARE: tl.constexpr,
    N: tl.constexpr,
):
    """The winner of one piece of the row from which a sequence's last token comes."""
    sequence, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_accepted = tl.load(num_accepted_ptr + sequence)
    row = sequence * (num_drafts + 1) + num_accepted
    words_ptr = draws_ptr + row * NUM_WORDS
    temperature, is_random = _temperature(words_ptr)
    best, total = tl.load(normalizers_ptr + sequence * 2), tl.load(normalizers_ptr + sequence * 2 + 1)
    has_draft = num_accepted < num_drafts
    draft = tl.load(drafts_ptr + sequence * num_drafts + num_accepted, mask=has_draft, other=-1)
    is_replaced = is_random & (draft >= 0)
    probs_ptr = draft_probs_ptr + (sequence * num_drafts + num_accepted) * vocab_size

    blocks = piece * N + tl.arange(0, N)
    noise = noise_words(
        tl.load(words_ptr + 1),
        tl.load(words_ptr + 2),
        tl.load(words_ptr + 3),
        tl.load(words_ptr + 4),
        blocks,
        tl.where(is_replaced, RECOVERY, TOKEN),
    )
    leads = tl.full([N], float("-inf"), tl.float32)
    winners = tl.full([N], 0, tl.int32)
    for word in tl.static_range(4):
        tokens = tokens_of(blocks, word)
        mask = tokens < vocab_size
        logit = tl.load(logits_ptr + row * row_stride + tokens, mask=mask, other=float("-inf"))
        lead = (logit - tl.where(best < float("inf"), best, 0.0)) / temperature
        if is_replaced:
            prob = tl.exp(lead) / total
            rest = tl.maximum(prob - tl.load(probs_ptr + tokens, mask=mask, other=0.0), prob * LEAST_SHARE)
            lead = tl.where(rest > 0, tl.log(tl.where(rest > 0, rest, 1.0)), float("-inf"))
        lead += tl.where(is_random, gumbel(noise[word]), 0.0)
        winners = tl.where(lead > leads, tokens, winners)  # of equal ones the first stays
        leads = tl.maximum(leads, lead)
    lead = tl.max(leads, 0)
    place = sequence * tl.num_programs(1) + piece
    tl.store(leads_ptr + place, lead)
    tl.store(tokens_ptr + place, tl.min(tl.where(leads == lead, winners, vocab_size), 0))


@triton.jit
def _finish_kernel(
    leads_ptr,
    tokens_ptr,
    num_accepted_ptr,
    normalizers_ptr,
    token_ids_ptr,
    num_drafts,
    num_pieces,
    P: tl.constexpr,
):
    """The token behind a sequence's accepted drafts, or -1."""
    sequence = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, P)
    is_piece = pieces < num_pieces
    leads = tl.load(leads_ptr + sequence * num_pieces + pieces, mask=is_piece, other=float("-inf"))
    tokens = tl.load(tokens_ptr + sequence * num_pieces + pieces, mask=is_piece, other=0)
    token = tl.min(tl.where(is_piece & (leads == tl.max(leads, 0)), tokens, 0x7FFFFFFF), 0)
    is_finite = tl.load(normalizers_ptr + sequence * 2) < float("inf")
    place = sequence * (num_drafts + 1) + tl.load(num_accepted_ptr + sequence)
    tl.store(token_ids_ptr + place, tl.where(is_finite, token, -1).to(tl.int64))


def rejection_sample_triton(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, logits: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [num_seqs, num_drafts + 1] and how many drafts were accepted [num_seqs], both int64.

    Args:
        draft_token_ids, draft_probs: contiguous.
        logits: contiguous in the last dimension.
        draws: a row of `kernels.gpu.sample.pack_draws` for each of the logits.
    """
    (num_seqs, num_drafts), (num_rows, vocab_size) = draft_token_ids.shape, logits.shape
    assert num_rows == num_seqs * (num_drafts + 1)
    assert draft_probs.shape == (num_seqs, num_drafts, vocab_size)
    assert draft_token_ids.dtype == torch.int64
    assert draft_probs.dtype == logits.dtype == torch.float32
    assert draft_token_ids.is_contiguous()
    assert draft_probs.is_contiguous()
    assert draws.is_contiguous()
    assert draws.shape == (num_rows, NUM_WORDS)
    assert logits.stride(1) == 1
    device = logits.device
    num_pieces = triton.cdiv(vocab_size, PIECE)
    p = triton.next_power_of_2(num_pieces)
    token_ids = torch.empty((num_seqs, num_drafts + 1), dtype=torch.int64, device=device)
    num_accepted = torch.empty(num_seqs, dtype=torch.int64, device=device)
    bests, sums = torch.empty((2, num_rows, num_pieces), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=device)
    leads = torch.empty((num_seqs, num_pieces), dtype=torch.float32, device=device)
    normalizers = torch.empty((num_seqs, 2), dtype=torch.float32, device=device)
    if num_seqs == 0:
        return token_ids, num_accepted
    row_stride = logits.stride(0)
    _sum_weights_kernel[num_rows, num_pieces](
        logits, draws, bests, sums, tokens, row_stride, vocab_size, N=PIECE, **OPTIONS
    )
    _accept_kernel[num_seqs,](
        draft_token_ids,
        draft_probs,
        logits,
        draws,
        bests,
        sums,
        tokens,
        token_ids,
        num_accepted,
        normalizers,
        row_stride,
        vocab_size,
        num_drafts,
        num_pieces,
        P=p,
        num_warps=1,
    )
    _recover_kernel[num_seqs, num_pieces](
        draft_token_ids,
        draft_probs,
        logits,
        draws,
        num_accepted,
        normalizers,
        leads,
        tokens,
        row_stride,
        vocab_size,
        num_drafts,
        LEAST_SHARE=LEAST_SHARE,
        N=PIECE // 4,
        **OPTIONS,
    )
    _finish_kernel[num_seqs,](
        leads, tokens, num_accepted, normalizers, token_ids, num_drafts, num_pieces, P=p, num_warps=1
    )
    return token_ids, num_accepted
