"""Drafts are verified so that nobody can tell them from drawing one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.gpu.rejection_sample import rejection_sample_triton
from kernels.gpu.sample import PIECE, pack_draws
from kernels.noise import Purpose
from kernels.rejection_sample import Verified, rejection_sample, rejection_sample_reference
from kernels.sample import Draw, sample_reference


def draws_of(num_seqs: int, num_drafts: int, **fields: float) -> list[Draw]:
    return [
        Draw(row=seq * (num_drafts + 1) + index, seed=seq, position=10 + index, **fields)  # type: ignore[arg-type]
        for seq in range(num_seqs)
        for index in range(num_drafts + 1)
    ]


def chi_square(token_ids: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(token_ids)
    counts = torch.bincount(token_ids, minlength=len(probs))
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_tokens_come_as_often_as_their_logits_say(temperature: float) -> None:
    """Of drafts from another distribution, drawn with the noise of the places that they are for."""
    num_seqs, vocab_size = 1500, 6
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((3, vocab_size), generator=generator)
    draft_probs = torch.softmax(torch.randn((2, vocab_size), generator=generator), dim=1)
    draws = draws_of(num_seqs, 2, temperature=temperature)
    drafting = [replace(draw, row=index, temperature=1.0) for draw in draws if (index := draw.row % 3) < 2]
    drafts = sample_reference(draft_probs.log(), drafting).view(num_seqs, 2)
    found = rejection_sample(drafts, draft_probs.repeat(num_seqs, 1, 1), logits.repeat(num_seqs, 1), draws)

    probs = torch.softmax(logits.double() / temperature, dim=1)
    overlap = torch.minimum(probs[:2], draft_probs.double()).sum(dim=1)
    assert float((found.num_accepted > 0).double().mean()) == pytest.approx(float(overlap[0]), abs=0.05)
    for place in range(3):
        there = found.token_ids[:, place][found.num_accepted >= place]
        assert len(there) > 200
        assert chi_square(there, probs[place]) < 24.6, "five degrees of freedom, p = 0.001 for all six together"


def test_without_probabilities_the_tokens_are_those_of_drawing_one_by_one() -> None:
    logits = 2 * torch.randn((40 * 4, 9), generator=torch.Generator().manual_seed(0))
    draws = draws_of(40, 3, top_k=5, top_p=0.9)
    drawn = sample_reference(logits, draws).view(40, 4)
    drafts = drawn[:, :3].clone()
    drafts[::2, 1] = (drafts[::2, 1] + 1) % 9
    drafts[::4, 0] = -1
    found = rejection_sample(drafts, None, logits, draws)
    assert found.num_accepted.tolist() == [0, 3, 1, 3] * 10
    for row, expected, count in zip(found.token_ids, drawn, found.num_accepted, strict=True):
        assert row.tolist() == expected[: count + 1].tolist() + [-1] * (3 - count)


def test_without_probabilities_a_draft_is_accepted_as_often_as_it_is_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drafts = torch.full((1000, 1), 1)
    found = rejection_sample(drafts, None, logits.repeat(2000, 1), draws_of(1000, 1))
    probs = torch.softmax(logits[0].double(), dim=0)
    assert float(found.num_accepted.double().mean()) == pytest.approx(float(probs[1]), abs=0.05)
    assert chi_square(found.token_ids[:, 0], probs) < 16.3, "three degrees of freedom, p = 0.001"


def test_what_a_draft_is_accepted_by_and_replaced_by_are_independent() -> None:
    (draw,) = draws_of(1, 0)
    device = torch.device("cpu")
    numbers = [draw.noise_key(purpose).uniforms(64, device) for purpose in Purpose]
    assert len(set(torch.cat(numbers).tolist())) == 3 * 64


@pytest.mark.parametrize("vocab_size", [7, 65, PIECE + 3])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_gpus_form_equals_the_plain_one(vocab_size: int, num_drafts: int) -> None:
    torch.manual_seed(vocab_size)
    num_seqs = 5
    wide = torch.full((num_seqs * (num_drafts + 1), vocab_size + 5), math.nan)
    logits = wide[:, 2 : 2 + vocab_size].copy_(2 * torch.randn(len(wide), vocab_size))
    logits[:, vocab_size // 2] = -math.inf
    draft_probs = torch.softmax(logits.view(num_seqs, num_drafts + 1, -1)[:, :num_drafts] + 0.3, dim=2)
    draft_probs = (draft_probs * (torch.rand_like(draft_probs) + 0.5)).contiguous()
    draft_probs /= draft_probs.sum(dim=2, keepdim=True)
    drafts = torch.multinomial(draft_probs.view(-1, vocab_size), 1).view(num_seqs, num_drafts)
    drafts[1, -1] = -1
    draws = [
        replace(draw, temperature=(0.8, 1.5, 0.0)[place % 3]) for place, draw in enumerate(draws_of(5, num_drafts))
    ]
    best = logits.view(num_seqs, num_drafts + 1, -1).argmax(dim=2)
    drafts[2:4] = best[2:4, :-1]

    expected = rejection_sample_reference(drafts, draft_probs, logits, draws)
    token_ids, num_accepted = rejection_sample_triton(drafts, draft_probs, logits, pack_draws(draws, vocab_size))

    assert token_ids.tolist() == expected.token_ids.tolist()
    assert num_accepted.tolist() == expected.num_accepted.tolist()


def verify_both(drafts: torch.Tensor, probs: torch.Tensor, logits: torch.Tensor, draws: list[Draw]) -> list[Verified]:
    token_ids, num_accepted = rejection_sample_triton(drafts, probs, logits, pack_draws(draws, logits.shape[1]))
    return [
        rejection_sample(drafts, probs, logits, draws),
        Verified(token_ids=token_ids, num_accepted=num_accepted),
    ]


def test_a_greedy_draft_is_accepted_if_it_is_the_first_of_the_best() -> None:
    logits = torch.zeros((6, 70))
    logits[:, [40, 60]] = 1.0
    drafts = torch.tensor([[40], [60], [-1]])
    for found in verify_both(drafts, torch.full((3, 1, 70), 1 / 70), logits, draws_of(3, 1, temperature=0)):
        assert found.token_ids.tolist() == [[40, 40], [40, -1], [40, -1]]
        assert found.num_accepted.tolist() == [1, 0, 0]


def test_a_distribution_that_is_the_drafters_own_accepts_every_draft() -> None:
    logits = torch.randn((4 * 3, 50), generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(logits.view(4, 3, 50)[:, :2], dim=2).contiguous()
    drafts = torch.multinomial(probs.view(8, 50), 1).view(4, 2)
    (plain, gpu) = verify_both(drafts, probs * (1 - 1e-5), logits, draws_of(4, 2))
    assert plain.num_accepted.tolist() == gpu.num_accepted.tolist() == [2] * 4
    assert plain.token_ids[:, :2].tolist() == drafts.tolist()
    assert plain.token_ids.tolist() == gpu.token_ids.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token(value: float | None, temperature: float) -> None:
    logits = torch.zeros((4, 70))
    logits[0, 3] = 100.0
    logits[1] = -math.inf
    if value is not None:
        logits[1, 50] = value
    probs = torch.full((2, 1, 70), 1 / 70)
    for found in verify_both(torch.tensor([[3], [9]]), probs, logits, draws_of(2, 1, temperature=temperature)):
        assert found.token_ids[0].tolist() == [3, -1]
        assert found.num_accepted[0] == 1
        assert found.token_ids[1, 0] >= 0


def test_no_sequences() -> None:
    drafts, words = torch.empty((0, 2), dtype=torch.int64), torch.empty((0, 9), dtype=torch.int32)
    token_ids, num_accepted = rejection_sample_triton(drafts, torch.empty((0, 2, 5)), torch.empty((0, 5)), words)
    assert token_ids.shape == (0, 3)
    assert num_accepted.shape == (0,)
