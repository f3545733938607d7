"""Noise against known answers, and every body that draws against the plain one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

import kernels.gpu.sample
from kernels.gpu.sample import PIECE, pack_draws, sample_triton
from kernels.noise import NoiseKey, Purpose, philox
from kernels.sample import Draw, sample_cpu, sample_reference
from tests.kernels.cpu_library import SETS, make_sampling_plan
from tests.kernels.plain_noise import plain_noise, plain_uniform

Body = Callable[[torch.Tensor, list[Draw]], torch.Tensor]
CPU = torch.device("cpu")


def sample_gpu(scores: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    is_truncated = any(draw.is_truncated(scores.shape[1]) for draw in draws)
    return sample_triton(scores, pack_draws(draws, scores.shape[1]), is_truncated=is_truncated)[0]


@pytest.fixture(scope="module", params=["triton", *SETS])
def body(request: pytest.FixtureRequest) -> Iterator[Body]:
    if request.param == "triton":
        yield sample_gpu
    else:
        plan = make_sampling_plan(request.param)
        yield lambda scores, draws: sample_cpu(plan, scores, draws)
        plan.close()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    found = philox(tuple(torch.tensor([word]) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def test_a_draws_numbers_are_the_same_in_every_version() -> None:
    # A stream may move between workers of neighbouring builds: these never change.
    assert plain_noise(0, 0, 0, 0) == pytest.approx(0.6748404365727088)
    assert plain_noise(2**64 - 1, 3, 100, 77) == pytest.approx(2.709548341430396)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_numbers_are_a_function_of_seed_choice_position_purpose_and_token(purpose: Purpose) -> None:
    found = []
    for seed, choice, position in [(0, 0, 0), (2**64 - 1, 0, 1), (-1, 7, 2**20), (12345678901234567890, 1, 3)]:
        key = NoiseKey(seed=seed, choice_index=choice, position=position, purpose=purpose)
        numbers = key.uniforms(131, CPU)
        assert numbers.tolist() == [plain_uniform(seed, choice, position, each, purpose) for each in range(131)]
        assert torch.equal(key.uniforms_at(torch.tensor([130, 0, 77])), numbers[[130, 0, 77]])
        found += numbers.tolist()
    assert len(set(found)) == 4 * 131


def test_numbers_are_even_and_never_0_or_1() -> None:
    keys = [NoiseKey(seed=3, choice_index=0, position=position) for position in range(50)]
    found = torch.stack([key.uniforms(4000, CPU) for key in keys])
    counts = torch.histc(found.float(), bins=100, min=0, max=1)
    assert 0 < found.min() < found.max() < 1
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 149, "99 degrees of freedom, p = 0.001"


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 65, 1000, PIECE + 1])
def test_equals_the_plain_form(body: Body, vocab_size: int) -> None:
    """Tenths: equal scores are common."""
    torch.manual_seed(vocab_size)
    wide = torch.full((5, vocab_size + 3), math.nan)
    scores = wide[1:4, :vocab_size].copy_((3 * torch.randn(3, vocab_size)).round(decimals=1))
    ways = [
        *product((0.7, 3.0), (0, 1, 50), (1.0, 0.9, 0.3), (0.0, 0.01)),
        (0.0, 3, 0.5, 0.9),
        (1e-40, 0, 1.0, 0.0),
        (0.01, 0, 0.5, 0.0),
        (1.0, 3000, 0.9999, 0.05),
        (1.0, 0, 1e-9, 0.0),
    ]
    if body is sample_gpu:  # half a second each in the interpreter
        ways = ways[vocab_size % 6 :: 6]
    draws = [
        Draw(row=i % 3, temperature=t, top_k=k, top_p=p, min_p=m, seed=i << 40, choice_index=i, position=7 * i)
        for i, (t, k, p, m) in enumerate(ways)
    ]
    expected = sample_reference(scores, draws)
    assert torch.equal(body(scores, draws), expected)
    assert body(scores, draws[3:4]).tolist() == expected[3:4].tolist(), "a neighbour changed a choice"


@pytest.mark.parametrize("kept", [{"top_k": 2000}, {"top_p": 0.99}, {"top_k": 2900, "top_p": 0.9}])
def test_more_tokens_than_can_be_gathered(body: Body, kept: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.gpu.sample, "MAX_GATHERED", kernels.gpu.sample.TILE)
    scores = torch.randn((1, 6000), generator=torch.Generator().manual_seed(0)).round(decimals=3)
    draws = [Draw(row=0, seed=seed, temperature=2, **kept) for seed in range(2)]  # type: ignore[arg-type]
    assert torch.equal(body(scores, draws), sample_reference(scores, draws))


def test_top_k_keeps_the_lowest_ids_of_equals(body: Body) -> None:
    scores = torch.zeros((1, 5000))
    scores[0, 4900] = 0.5
    draws = [Draw(row=0, top_k=5, temperature=5, seed=seed) for seed in range(4)]
    found = body(scores, draws)
    assert torch.equal(found, sample_reference(scores, draws))
    assert len(set(found.tolist())) > 1
    assert set(found.tolist()) <= {0, 1, 2, 3, 4900}


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_row_that_is_not_finite_has_no_token(body: Body, way: dict[str, float], value: float | None) -> None:
    scores = torch.zeros((2, 100))
    if value is None:
        scores[1] = -math.inf
    else:
        scores[1, 70] = value
    draws = [Draw(row=row, **way) for row in (0, 1)]  # type: ignore[arg-type]
    found = body(scores, draws).tolist()
    assert found[0] >= 0
    assert found[1] == -1
    assert sample_reference(scores, draws).tolist() == found


def test_what_is_masked_is_never_chosen(body: Body) -> None:
    scores = torch.full((1, 5000), -math.inf)
    scores[0, [1, 4500]] = torch.tensor([0.0, 1.0])
    draws = [Draw(row=0, seed=seed, top_p=1 - seed % 2 / 100, temperature=9) for seed in range(4)]
    assert set(body(scores, draws).tolist()) == {1, 4500}


def test_draws_that_mean_nothing_end_in_a_token(body: Body) -> None:
    scores = torch.randn((1, 1000))
    odd: list[dict[str, float]] = [{"top_k": -1}, {"top_p": -1.0}, {"top_p": math.nan}, {"min_p": 7.0}, {"min_p": -1.0}]
    found = body(scores, [Draw(row=0, **one) for one in odd])  # type: ignore[arg-type]
    assert all(0 <= token_id < 1000 for token_id in found.tolist())


def test_log_normalizers_come_with_the_draw() -> None:
    logits = 3 * torch.randn((3, PIECE + 70), generator=torch.Generator().manual_seed(0))
    scores = logits.clone()
    scores[:, 5:] = -math.inf
    token_ids, log_normalizers = sample_triton(
        scores, pack_draws([Draw(row=2), Draw(row=0, temperature=0)], logits.shape[1]), logits
    )
    assert token_ids.max() < 5
    assert log_normalizers is not None
    assert log_normalizers.tolist() == pytest.approx(logits[[2, 0]].double().logsumexp(1).tolist(), abs=1e-5)


def test_no_draws() -> None:
    assert sample_triton(torch.zeros(3, 5), torch.empty((0, 9), dtype=torch.int32))[0].tolist() == []
