"""See `kernels.sample`. A row is drawn by several programs, each of a piece of it, and a last one that compares their
winners; before them, where anything is truncated, one program a row finds the least score that may be chosen.

It looks for that score by halving, over the few tokens that can be the one: those that are not below the k-th best of
the best scores of its lanes, or below the mean of what top-p may leave out. Should they be more than a program gathers,
it halves over the whole row. So nothing is sorted; sums have one order, and a row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.gpu.noise import gumbel, noise_words, tokens_of
from kernels.noise import Purpose
from kernels.sample import Draw

NUM_WORDS = tl.constexpr(9)
"""Of a draw: row, seed (two words), position, choice, top-k, and as float32 temperature, top-p, min-p."""
PIECE = 4096
TILE = 2048
MAX_GATHERED = 8192
FLOOR_OPTIONS = {"num_warps": 8}
RACE_OPTIONS = {"num_warps": 8}
TOKEN_PURPOSE = tl.constexpr(int(Purpose.TOKEN))


def pack_draws(draws: Sequence[Draw], vocab_size: int) -> torch.Tensor:
    """What the kernels read of draws, [num_draws, NUM_WORDS] int32 on the CPU."""
    integers = [
        (draw.row, draw.seed, draw.seed >> 32, draw.position, draw.choice_index, draw.num_likeliest(vocab_size))
        for draw in draws
    ]
    floats = [(0.0 if draw.is_greedy else draw.temperature, draw.top_p, draw.min_p) for draw in draws]
    words = torch.tensor([[(value + 2**31 & 0xFFFFFFFF) - 2**31 for value in row] for row in integers])
    return torch.cat((words.int(), torch.tensor(floats, dtype=torch.float32).view(torch.int32)), dim=1)


@triton.jit
def _number(word_ptr):
    return tl.load(word_ptr).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(score):
    """An integer that grows with the score."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _score_of(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _measure(scores_ptr, size, least, best, inverse, IS_COUNT: tl.constexpr, IS_ABOVE: tl.constexpr, N: tl.constexpr):
    """How many tokens, or how much weight, has a score of at least `least`, or above it."""
    columns = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for start in range(0, size, N):
        mask = start + columns < size
        score = tl.load(scores_ptr + start + columns, mask=mask, other=float("-inf"))
        is_in = mask & ((score > least) if IS_ABOVE else (score >= least))
        total += tl.where(is_in, 1.0 if IS_COUNT else tl.exp((score - best) * inverse), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _find_border(scores_ptr, size, share, lowest, best, inverse, IS_COUNT: tl.constexpr, N: tl.constexpr):
    """The highest score from which on tokens have the share, by halving; `lowest` where there is none."""
    low, high = _key_of(lowest), _key_of(best) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        has_share = _measure(scores_ptr, size, _score_of(middle), best, inverse, IS_COUNT, False, N) >= share
        low, high = tl.where(has_share, middle, low), tl.where(has_share, high, middle)
    return _score_of(low)


@triton.jit
def _find_last(row_ptr, vocab_size, border, num_kept, N: tl.constexpr):
    """The id of the token that is number `num_kept` of those with the border's score."""
    columns = tl.arange(0, N)
    num_seen = 0
    last = vocab_size
    for start in range(0, vocab_size, N):
        mask = start + columns < vocab_size
        is_tie = (tl.load(row_ptr + start + columns, mask=mask, other=float("inf")) == border) & mask
        count = tl.sum(is_tie.to(tl.int32), 0)
        if (num_seen < num_kept) & (num_seen + count >= num_kept):
            number = num_seen + tl.cumsum(is_tie.to(tl.int32), 0)
            last = tl.max(tl.where(is_tie & (number <= num_kept), start + columns, -1), 0)
        num_seen += count
    return last


@triton.jit
def _find_floor_kernel(
    scores_ptr,
    draws_ptr,
    gathered_ptr,
    floors_ptr,
    lasts_ptr,
    row_stride,
    vocab_size,
    NUM_GATHERED: tl.constexpr,
    N: tl.constexpr,
):
    """Of the tokens that may be chosen the least score, and of those that have it the last id."""
    draw = tl.program_id(0)
    words_ptr = draws_ptr + draw * NUM_WORDS
    row_ptr = scores_ptr + tl.load(words_ptr).to(tl.int64) * row_stride
    own_ptr = gathered_ptr + draw.to(tl.int64) * NUM_GATHERED
    top_k = tl.load(words_ptr + 5)
    temperature, top_p, min_p = _number(words_ptr + 6), _number(words_ptr + 7), _number(words_ptr + 8)
    has_top_k, has_top_p, has_min_p = top_k < vocab_size, top_p < 1, min_p > 0
    top_p = tl.maximum(top_p, 0.0)
    tl.store(floors_ptr + draw, float("-inf"))
    tl.store(lasts_ptr + draw, vocab_size)
    if (temperature == 0) | ~(has_top_k | has_top_p | has_min_p):
        return

    columns = tl.arange(0, N)
    tops = tl.full([N], float("-inf"), tl.float32)  # of each lane
    for start in range(0, vocab_size, N):
        mask = start + columns < vocab_size
        tops = tl.maximum(tops, tl.load(row_ptr + start + columns, mask=mask, other=float("-inf")))
    best = tl.max(tops, 0)
    if tl.abs(best) == float("inf"):
        return
    inverse = 1 / temperature

    lowest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0, tl.float32)
    if has_min_p:
        lowest = best + temperature * tl.log(tl.minimum(min_p, 1.0))
    if has_top_k:
        if top_k <= N:
            tl.store(own_ptr + columns, tops)
            tl.debug_barrier()  # every score is there before one is read
            lowest = tl.maximum(lowest, _find_border(own_ptr, N, top_k, lowest, best, inverse, True, N))
            tl.debug_barrier()  # and all have been read before one is overwritten
    elif has_top_p & ~has_min_p:
        total = _measure(row_ptr, vocab_size, lowest, best, inverse, False, False, N)
        # Tokens below the mean of what may be left out make up less than that.
        lowest = best + temperature * (tl.log((1 - top_p) * total / vocab_size) - 1e-3)

    num_gathered = 0
    for start in range(0, vocab_size, N):
        mask = start + columns < vocab_size
        score = tl.load(row_ptr + start + columns, mask=mask, other=float("-inf"))
        is_in = (score >= lowest) & mask
        count = tl.sum(is_in.to(tl.int32), 0)
        if (count > 0) & (num_gathered + count <= NUM_GATHERED):
            places = num_gathered + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(own_ptr + places, score, mask=is_in)
        num_gathered += count
    tl.debug_barrier()  # as above
    source_ptr, size = row_ptr, vocab_size
    if num_gathered <= NUM_GATHERED:
        source_ptr, size = own_ptr, num_gathered

    num_kept = tl.full((), 0, tl.float32) + vocab_size  # of those with the lowest score
    if has_top_k:
        lowest = _find_border(source_ptr, size, top_k, lowest, best, inverse, True, N)
        num_kept = top_k - _measure(source_ptr, size, lowest, best, inverse, True, True, N)
    if has_top_p:
        if has_top_k:
            above = _measure(source_ptr, size, lowest, best, inverse, False, True, N)
            total = above + num_kept * tl.exp((lowest - best) * inverse)
        elif has_min_p:
            total = _measure(source_ptr, size, lowest, best, inverse, False, False, N)
        border = _find_border(source_ptr, size, top_p * total, lowest, best, inverse, False, N)
        missing = top_p * total - _measure(source_ptr, size, border, best, inverse, False, True, N)
        weight = tl.maximum(tl.exp((border - best) * inverse), 1e-37)
        num_wanted = tl.maximum(tl.ceil(tl.minimum(missing / weight, vocab_size + 0.0)), 1.0)
        num_kept = tl.where(border == lowest, tl.minimum(num_kept, num_wanted), num_wanted)
        lowest = border
    tl.store(floors_ptr + draw, lowest)
    num_from = _measure(source_ptr, size, lowest, best, inverse, True, False, N)
    if num_from - _measure(source_ptr, size, lowest, best, inverse, True, True, N) > num_kept:
        tl.store(lasts_ptr + draw, _find_last(row_ptr, vocab_size, lowest, num_kept.to(tl.int32), N))


@triton.jit
def _race_kernel(
    scores_ptr,
    logits_ptr,
    draws_ptr,
    floors_ptr,
    lasts_ptr,
    bests_ptr,
    leads_ptr,
    tokens_ptr,
    logit_bests_ptr,
    logit_sums_ptr,
    row_stride,
    logits_stride,
    vocab_size,
    IS_TRUNCATED: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    N: tl.constexpr,
):
    """One piece of a row: its best score, the winner among its tokens and by how much it leads the best score; and the
    sum of the exponentials of its logits, of the best one's."""
    draw, piece = tl.program_id(0), tl.program_id(1)
    words_ptr = draws_ptr + draw * NUM_WORDS
    row = tl.load(words_ptr).to(tl.int64)
    temperature = _number(words_ptr + 6)
    is_random = temperature > 0
    inverse = tl.where(is_random, 1 / tl.where(is_random, temperature, 1.0), 1.0)
    blocks = piece * N + tl.arange(0, N)

    tops = tl.full([N], float("-inf"), tl.float32)
    logit_tops = tl.full([N], float("-inf"), tl.float32)
    is_wrong = tl.zeros([N], tl.int1)
    for word in tl.static_range(4):
        tokens = tokens_of(blocks, word)
        score = tl.load(scores_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
        is_wrong |= (score != score) | (score == float("inf"))
        tops = tl.maximum(tops, score)
        if HAS_LOGITS:
            logit = tl.load(logits_ptr + row * logits_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
            logit_tops = tl.maximum(logit_tops, logit)
    best = tl.where(tl.max(is_wrong.to(tl.int32), 0) > 0, float("inf"), tl.max(tops, 0))
    logit_best = tl.max(logit_tops, 0)

    floor, last = tl.full((), float("-inf"), tl.float32), vocab_size
    if IS_TRUNCATED:
        floor, last = tl.load(floors_ptr + draw), tl.load(lasts_ptr + draw)
    reference = tl.where(tl.abs(best) == float("inf"), 0.0, best)  # a piece may have nothing that may be chosen
    nothing = blocks.to(tl.uint32, bitcast=True)
    noise = (nothing, nothing, nothing, nothing)
    if is_random & (best >= floor):
        noise = noise_words(
            tl.load(words_ptr + 1),
            tl.load(words_ptr + 2),
            tl.load(words_ptr + 3),
            tl.load(words_ptr + 4),
            blocks,
            TOKEN_PURPOSE,
        )
    leads = tl.full([N], float("-inf"), tl.float32)
    winners = tl.full([N], 0, tl.int32)
    sums = tl.zeros([N], tl.float32)
    for word in tl.static_range(4):
        tokens = tokens_of(blocks, word)
        score = tl.load(scores_ptr + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
        lead = (score - reference) * inverse + tl.where(is_random, gumbel(noise[word]), 0.0)
        if IS_TRUNCATED:
            lead = tl.where((score > floor) | ((score == floor) & (tokens <= last)), lead, float("-inf"))
        winners = tl.where(lead > leads, tokens, winners)  # of equal ones the first stays
        leads = tl.maximum(leads, lead)
        if HAS_LOGITS:
            logit = tl.load(logits_ptr + row * logits_stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
            sums += tl.exp(logit - tl.where(logit_best == float("-inf"), 0.0, logit_best))
    lead = tl.max(leads, 0)
    place = draw * tl.num_programs(1) + piece
    tl.store(bests_ptr + place, best)
    tl.store(leads_ptr + place, lead)
    tl.store(tokens_ptr + place, tl.min(tl.where(leads == lead, winners, vocab_size), 0))
    if HAS_LOGITS:
        tl.store(logit_bests_ptr + place, logit_best)
        tl.store(logit_sums_ptr + place, tl.sum(sums, 0))


@triton.jit
def _finish_kernel(
    draws_ptr,
    bests_ptr,
    leads_ptr,
    tokens_ptr,
    logit_bests_ptr,
    logit_sums_ptr,
    token_ids_ptr,
    log_normalizers_ptr,
    num_pieces,
    HAS_LOGITS: tl.constexpr,
    P: tl.constexpr,
):
    """The winner of a row's pieces, or -1."""
    draw = tl.program_id(0)
    pieces = tl.arange(0, P)
    is_piece = pieces < num_pieces
    places = draw * num_pieces + pieces
    temperature = _number(draws_ptr + draw * NUM_WORDS + 6)
    inverse = tl.where(temperature > 0, 1 / tl.where(temperature > 0, temperature, 1.0), 1.0)
    bests = tl.load(bests_ptr + places, mask=is_piece, other=float("-inf"))
    best = tl.max(bests, 0)
    is_finite = tl.abs(best) < float("inf")
    leads = tl.load(leads_ptr + places, mask=is_piece, other=float("-inf"))
    leads += (tl.where(is_finite, bests, 0.0) - tl.where(is_finite, best, 0.0)) * inverse
    tokens = tl.load(tokens_ptr + places, mask=is_piece, other=0)
    token = tl.min(tl.where(is_piece & (leads == tl.max(leads, 0)), tokens, 0x7FFFFFFF), 0)
    tl.store(token_ids_ptr + draw, tl.where(is_finite, token, -1).to(tl.int64))
    if HAS_LOGITS:
        logit_bests = tl.load(logit_bests_ptr + places, mask=is_piece, other=float("-inf"))
        logit_best = tl.max(logit_bests, 0)
        shrink = tl.exp(logit_bests - tl.where(logit_best == float("-inf"), 0.0, logit_best))
        total = tl.sum(tl.load(logit_sums_ptr + places, mask=is_piece, other=0.0) * shrink, 0)
        tl.store(log_normalizers_ptr + draw, logit_best + tl.log(total))


def sample_triton(
    scores: torch.Tensor, draws: torch.Tensor, logits: torch.Tensor | None = None, *, is_truncated: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids [num_draws] int64, and log-normalizers [num_draws] float32 where there are logits.

    Args:
        scores, logits: [num_rows, vocab_size] float32, contiguous in the last dimension.
        draws: from `pack_draws`.
        is_truncated: whether one of the draws may be.
    """
    vocab_size, num_draws, device = scores.shape[1], len(draws), scores.device
    has_logits = logits is not None
    if logits is None:
        logits = scores
    assert scores.dtype == logits.dtype == torch.float32
    assert scores.shape == logits.shape
    assert scores.stride(1) == logits.stride(1) == 1
    assert draws.dtype == torch.int32
    assert draws.shape == (num_draws, NUM_WORDS)
    assert draws.is_contiguous()
    num_pieces = triton.cdiv(vocab_size, PIECE)
    token_ids = torch.empty(num_draws, dtype=torch.int64, device=device)
    log_normalizers = torch.empty(num_draws, dtype=torch.float32, device=device)
    floors = torch.empty(num_draws, dtype=torch.float32, device=device)
    lasts = torch.empty(num_draws, dtype=torch.int32, device=device)
    bests, leads, logit_bests, logit_sums = torch.empty((4, num_draws, num_pieces), dtype=torch.float32, device=device)
    tokens = torch.empty((num_draws, num_pieces), dtype=torch.int32, device=device)
    if num_draws == 0:
        return token_ids, log_normalizers if has_logits else None
    if is_truncated:
        gathered = torch.empty((num_draws, MAX_GATHERED), dtype=torch.float32, device=device)
        _find_floor_kernel[num_draws,](
            scores,
            draws,
            gathered,
            floors,
            lasts,
            scores.stride(0),
            vocab_size,
            NUM_GATHERED=MAX_GATHERED,
            N=TILE,
            **FLOOR_OPTIONS,
        )
    _race_kernel[num_draws, num_pieces](
        scores,
        logits,
        draws,
        floors,
        lasts,
        bests,
        leads,
        tokens,
        logit_bests,
        logit_sums,
        scores.stride(0),
        logits.stride(0),
        vocab_size,
        IS_TRUNCATED=is_truncated,
        HAS_LOGITS=has_logits,
        N=PIECE // 4,
        **RACE_OPTIONS,
    )
    _finish_kernel[num_draws,](
        draws,
        bests,
        leads,
        tokens,
        logit_bests,
        logit_sums,
        token_ids,
        log_normalizers,
        num_pieces,
        HAS_LOGITS=has_logits,
        P=triton.next_power_of_2(num_pieces),
        num_warps=1,
    )
    return token_ids, log_normalizers if has_logits else None
