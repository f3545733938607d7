"""The engine over a real, tiny model: the same greedy tokens however they were computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from weir.core.request import SamplingParams
from weir.engine.llm import LLM

PROMPTS = [
    [(11 * start + 7 * index) % 90 + 3 for index in range(length)] for start, length in enumerate((1, 5, 33, 70))
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, top_p=0.9, max_tokens=24, ignore_eos=True, logprobs=2)


def make_llm(model_dir: Path, **settings: object) -> LLM:
    defaults: dict[str, object] = {"device": "cpu", "max_model_len": 128, "block_size": 16, "num_blocks": 64}
    return LLM(model_dir, **(defaults | settings))


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> dict[SamplingParams, list[list[int]]]:
    """Each prompt alone, in one chunk, without a prefix cache."""
    llm = make_llm(tiny_model_dir, enable_prefix_caching=False)
    return {params: [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS] for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1, "num_blocks": 600},
        {"block_size": 256, "num_blocks": 8},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"block_size": 8, "num_blocks": 17, "max_num_batched_tokens": 40, "max_num_seqs": 4},
    ],
    ids=["block 1", "block 256", "chunks of 7", "preempted"],
)
def test_tokens_equal_the_solo_run(
    tiny_model_dir: Path,
    solo: dict[SamplingParams, list[list[int]]],
    settings: dict[str, object],
    sampling: SamplingParams,
) -> None:
    llm = make_llm(tiny_model_dir, **settings)
    for round_trip in ("cold", "hot"):
        found = llm.generate(PROMPTS, sampling)
        assert [generation.token_ids for generation in found] == solo[sampling], round_trip
    llm.check_integrity()
    if settings.get("num_blocks") == 17:
        assert llm.stats.num_preemptions > 0


def test_prompt_logprobs_do_not_depend_on_chunks(tiny_model_dir: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    whole, chunked = (
        make_llm(tiny_model_dir, max_num_batched_tokens=budget, max_num_seqs=4).generate([PROMPTS[3]], sampling)[0]
        for budget in (128, 9)
    )
    assert len(whole.prompt_logprobs) == 69
    for one, other in zip(whole.prompt_logprobs, chunked.prompt_logprobs, strict=True):
        assert one.top_token_ids == other.top_token_ids
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
