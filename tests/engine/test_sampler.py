"""The sampler against plain float64 references, and its purity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.plan import Plan
from tests.kernels.cpu_library import SETS, make_sampling_plan
from tests.kernels.plain_noise import plain_noise
from weir.core.request import SamplingParams
from weir.engine.sampler import SamplingRow, launch_sampling, sample

VOCAB_SIZE = 23


@pytest.fixture(scope="module", params=["torch", *SETS])
def plan(request: pytest.FixtureRequest) -> Iterator[Plan | None]:
    """Who draws: torch, or the CPU kernels of an instruction set."""
    made = None if request.param == "torch" else make_sampling_plan(request.param)
    yield made
    if made is not None:
        made.close()


def make_row(params: SamplingParams, index: int = 0, **fields: object) -> SamplingRow:
    values: dict[str, object] = {"token_ids": [1, 2, 3], "num_prompt_tokens": 3, "choice_index": 0} | fields
    values.setdefault("position", len(values["token_ids"]))  # type: ignore[arg-type]
    return SamplingRow(logits_row=index, params=params, **values)  # type: ignore[arg-type]


def reference_scores(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Bias, penalties and masks, one token after the other, each rounded to float32."""
    scores = logits.astype(np.float32).copy()
    params = row.params
    output = list(row.token_ids[row.num_prompt_tokens :])
    for token_id, bias in params.logit_bias:
        scores[token_id] = float(scores[token_id]) + bias
    for token_id in set(row.token_ids):
        factor, score = params.repetition_penalty, float(scores[token_id])
        scores[token_id] = score / factor if score > 0 else score * factor
    for token_id in set(output):
        addend = -params.frequency_penalty * output.count(token_id) - params.presence_penalty
        scores[token_id] = float(scores[token_id]) + addend
    banned = set(row.stop_token_ids) if len(output) < params.min_tokens else set()
    for word in params.bad_words_token_ids:
        head = list(word[:-1])
        if output[len(output) - len(head) :] == head:
            banned.add(word[-1])
    allowed = set(range(VOCAB_SIZE) if params.allowed_token_ids is None else params.allowed_token_ids)
    kept = allowed - banned or allowed
    for token_id in range(VOCAB_SIZE):
        if token_id not in kept:
            scores[token_id] = -math.inf
    return scores.astype(np.float64)


def reference_token(logits: np.ndarray, row: SamplingRow) -> int:
    """The whole rule in plain Python."""
    params = row.params
    scores = reference_scores(logits, row)
    order = sorted(range(VOCAB_SIZE), key=lambda token_id: (-scores[token_id], token_id))
    if params.temperature == 0:
        return order[0]
    best = scores[order[0]]
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    kept = [token_id for token_id in order if weights[token_id] >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        share = params.top_p * sum(weights[token_id] for token_id in kept)
        before, nucleus = 0.0, []
        for token_id in kept:
            if nucleus and before >= share:
                break
            nucleus.append(token_id)
            before += weights[token_id]
        kept = nucleus
    sums = {
        token_id: (scores[token_id] - best) / params.temperature
        + plain_noise(params.seed, row.choice_index, len(row.token_ids), token_id)
        for token_id in kept
    }
    return min(kept, key=lambda token_id: (-sums[token_id], token_id))


token = st.integers(0, VOCAB_SIZE - 1)
sampling = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, VOCAB_SIZE, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    min_tokens=st.integers(0, 3),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, 2.5, 100.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_token_ids=st.one_of(st.none(), st.lists(token, min_size=1, max_size=5, unique=True).map(tuple)),
    bad_words_token_ids=st.lists(st.lists(token, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
)


@st.composite
def rows(draw: st.DrawFn, index: int) -> SamplingRow:
    prompt = draw(st.lists(token, min_size=1, max_size=4))
    output = draw(st.lists(token, max_size=4))
    return make_row(
        draw(sampling),
        index,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        output_counts={token_id: output.count(token_id) for token_id in output},
        choice_index=draw(st.integers(0, 3)),
        stop_token_ids=frozenset(draw(st.lists(token, max_size=2))),
    )


@given(data=st.data())
def test_every_rule_equals_the_reference(plan: Plan | None, data: st.DataObject) -> None:
    batch = [data.draw(rows(index)) for index in range(data.draw(st.integers(1, 6)))]
    # Quarters: equal logits are common, and sums are exact enough for a plain reference.
    values = data.draw(
        st.lists(st.integers(-20, 20), min_size=VOCAB_SIZE * len(batch), max_size=VOCAB_SIZE * len(batch))
    )
    logits = torch.tensor(values, dtype=torch.float32).view(len(batch), VOCAB_SIZE) / 4
    before = logits.clone()
    tokens = [item.token_id for item in sample(logits, batch, plan)]
    assert tokens == [reference_token(logits[index].numpy(), row) for index, row in enumerate(batch)]
    assert torch.equal(logits, before), "the logits belong to the caller"
    alone = [
        sample(logits[index : index + 1], [replace(row, logits_row=0)], plan)[0].token_id
        for index, row in enumerate(batch)
    ]
    assert alone == tokens, "a neighbour changed a choice"


def test_draws_follow_the_distribution(plan: Plan | None) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(4000, 1)
    batch = [make_row(SamplingParams(seed=7), index, token_ids=[0] * (index + 1)) for index in range(4000)]
    counts = np.bincount([item.token_id for item in sample(logits, batch, plan)], minlength=4)
    expected = torch.softmax(logits[0].double(), dim=0).numpy() * 4000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3, "three degrees of freedom, p = 0.001"


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.full((2, 50_000), 1.0)
    logits[1, [30_000, 49_999]] = 2.0
    greedy = SamplingParams(temperature=0)
    assert [item.token_id for item in sample(logits, [make_row(greedy, 0), make_row(greedy, 1)])] == [0, 30_000]


def test_choices_may_share_a_row(plan: Plan | None) -> None:
    logits = torch.zeros((1, VOCAB_SIZE))
    batch = [make_row(SamplingParams(seed=3), 0, choice_index=index) for index in range(8)]
    assert len({item.token_id for item in sample(logits, batch, plan)}) > 1


def test_half_the_weight_is_more_than_one_of_two_best_tokens(plan: Plan | None) -> None:
    logits = torch.full((1, VOCAB_SIZE), -5.0)
    logits[0, [7, 19]] = 3.0
    logits[0, 3] = 2.75  # of weight 1.4e-11: with it the two best are each a little less than half
    batch = [make_row(SamplingParams(seed=seed, temperature=0.01, top_p=0.5)) for seed in range(64)]
    chosen = [item.token_id for item in sample(logits, batch, plan)]
    assert chosen == [reference_token(logits[0].numpy(), row) for row in batch]
    assert set(chosen) == {7, 19}


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-6])
def test_smallest_temperatures_are_greedy(plan: Plan | None, temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, -1000.0, 2.999]])
    (item,) = sample(logits, [make_row(SamplingParams(temperature=temperature))], plan)
    assert item.token_id == 1


@pytest.mark.parametrize("penalty", [5e-324, 1e-38, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_strangest_repetition_penalty_overflows_nothing(
    plan: Plan | None, penalty: float, temperature: float
) -> None:
    logits = torch.tensor([[4.0, 3.0, -2.0, 1.0]])
    params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
    (item,) = sample(logits, [make_row(params, token_ids=[1, 2], num_prompt_tokens=2)], plan)
    assert item.token_id in ((1,) if penalty < 1 else (0, 3))


def test_large_vocabulary_is_truncated_exactly(plan: Plan | None) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(6, 30_000, generator=generator) * 3).round(decimals=1)
    params = [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, top_p=0.999, temperature=4.0),
        SamplingParams(seed=3, top_k=40),
        SamplingParams(seed=4, top_k=700, top_p=0.5),
        SamplingParams(seed=5, top_p=1e-9),
        SamplingParams(seed=6, top_k=29_999, temperature=5.0),
    ]
    for _ in range(3):
        params = [replace(item, seed=item.seed + 100) for item in params]
        batch = [make_row(item, index) for index, item in enumerate(params)]
        for row, item in zip(batch, sample(logits, batch, plan), strict=True):
            assert item.token_id == _reference_large(logits[row.logits_row].double().numpy(), row)


def _reference_large(scores: np.ndarray, row: SamplingRow) -> int:
    order = np.argsort(-scores, kind="stable")
    weights = np.exp((scores - scores.max()) / row.params.temperature)[order]
    if row.params.top_k:
        weights, order = weights[: row.params.top_k], order[: row.params.top_k]
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    kept = before < row.params.top_p * weights.sum()
    kept[0] = True
    tokens, params = order[kept], row.params
    noise = [plain_noise(params.seed, row.choice_index, len(row.token_ids), int(token_id)) for token_id in tokens]
    return int(tokens[np.argmax(scores[tokens] / params.temperature + np.array(noise))])


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(plan: Plan | None, params: SamplingParams, value: float) -> None:
    logits = torch.zeros((2, VOCAB_SIZE))
    logits[1, 4] = value
    with pytest.raises(FloatingPointError):
        sample(logits, [make_row(params, 0), make_row(params, 1)], plan)


def test_logprobs_are_of_the_untouched_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    params = SamplingParams(temperature=0.1, logit_bias=((0, 50.0),), top_k=1, logprobs=2)
    (item,) = sample(logits, [make_row(params)])
    assert item.token_id == 0
    assert item.logprobs is not None
    normalizer = math.log(1 + math.e + 2 * math.e**2)
    assert item.logprobs.logprob == pytest.approx(-normalizer)
    assert item.logprobs.rank == 4
    assert item.logprobs.top_token_ids == (2, 3)
    assert item.logprobs.top_logprobs == pytest.approx((2 - normalizer, 2 - normalizer))


def test_no_rows_give_no_tokens(plan: Plan | None) -> None:
    assert sample(torch.zeros((0, VOCAB_SIZE)), [], plan) == ()


def test_what_is_launched_can_be_gathered_from_before_it_is_collected(plan: Plan | None) -> None:
    logits = torch.randn((4, VOCAB_SIZE), generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(seed=1, logprobs=2),
        SamplingParams(seed=2, presence_penalty=1.0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(seed=3, logit_bias=((5, 2.0),), logprobs=1),
    ]
    batch = [make_row(item, index, output_counts={3: 1}) for index, item in enumerate(params)]
    pending = launch_sampling(logits, batch, plan)
    assert pending.token_ids.dtype == torch.int64
    collected = pending.collect()
    assert pending.token_ids.tolist() == [item.token_id for item in collected]
    assert [None if item.logprobs is None else len(item.logprobs.top_token_ids) for item in collected] == [
        2,
        None,
        0,
        1,
    ]
    assert collected == tuple(
        sample(logits[index : index + 1], [replace(row, logits_row=0)], plan)[0] for index, row in enumerate(batch)
    )
    for item, row in zip(collected, logits.double(), strict=True):
        if item.logprobs is not None:
            assert item.logprobs.token_id == item.token_id
            assert item.logprobs.logprob == pytest.approx(float(row.log_softmax(0)[item.token_id]))
