"""A step is launched before the results of the one before are taken."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.model_runner import expected_output, make_request
from weir.engine.batch import Batch

PROMPT = [1, 2, 3, 5, 7]


def make_harness(**settings: object) -> EngineHarness:
    return EngineHarness(runs_ahead=True, **settings)


def test_a_step_is_launched_on_a_token_that_nobody_knows_yet() -> None:
    harness = make_harness()
    harness.submit(make_request("a", PROMPT, max_tokens=10))
    seen: list[tuple[int, int]] = []
    harness.runner.before_execute = lambda batch: seen.append(
        (int(batch.seq_lens[0]), len(harness.tokens.get("a", [])))
    )
    harness.run()
    assert seen == [(5, 0), *((5 + index, index - 1) for index in range(1, 10))]
    harness.check_outputs([make_request("a", PROMPT, max_tokens=10)])


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.2},
        {"presence_penalty": 0.2},
        {"bad_words_token_ids": ((3, 4),)},
    ],
    ids=str,
)
def test_a_choice_that_looks_back_waits_for_the_token_before(sampling: dict[str, object]) -> None:
    harness = make_harness()
    request = make_request("a", PROMPT, max_tokens=6, **sampling)
    harness.submit(request)
    known: list[int] = []
    harness.runner.before_execute = lambda batch: known.append(len(harness.tokens.get("a", [])))
    harness.run()
    assert known == list(range(6))
    if "bad_words_token_ids" not in sampling:
        harness.check_outputs([request])


def test_blocks_of_an_ended_sequence_are_free_when_the_last_step_that_writes_them_is_over() -> None:
    harness = make_harness(num_blocks=16)
    request = make_request("a", PROMPT, max_tokens=30)
    harness.submit(request)
    harness.step(3)
    harness.engine.abort("a")
    harness.engine.check_integrity()
    harness.engine.update_stats()
    assert harness.engine.stats.num_running == 0
    assert harness.num_free_blocks < 16
    # The name is free at once, and the newcomer gets other blocks.
    harness.submit(make_request("a", PROMPT, max_tokens=3))
    harness.step()
    harness.run()
    assert harness.num_free_blocks == 16
    assert harness.tokens["a"][-3:] == expected_output(make_request("a", PROMPT, max_tokens=3))[0]


def test_a_stop_token_ends_a_sequence_that_another_step_computes_already() -> None:
    output, _ = expected_output(make_request("a", PROMPT, max_tokens=40))
    stop = output[5]
    request = make_request("a", PROMPT, max_tokens=40, stop_token_ids=(stop,))
    other = make_request("b", PROMPT[:3], max_tokens=12)
    harness = make_harness()
    harness.submit(request, other)
    harness.run()
    harness.check_outputs([request, other])
    assert harness.num_free_blocks == 64


def test_a_step_that_fails_takes_the_next_one_back_and_costs_nobody_a_token() -> None:
    requests = [make_request(name, [*PROMPT, index], max_tokens=12) for index, name in enumerate("abc")]
    harness = make_harness()
    harness.submit(*requests)
    numbers = iter(range(1000))

    def fail_twice(batch: Batch) -> None:
        if next(numbers) in (3, 8):
            raise RuntimeError("a passing fault")

    harness.runner.before_execute = fail_twice
    harness.run()
    harness.check_outputs(requests)
    assert not harness.errors
    assert harness.num_free_blocks == 64


def test_logits_that_are_no_numbers_are_found_a_step_later_and_end_one_sequence_alone() -> None:
    good = make_request("good", PROMPT, max_tokens=12)
    harness = make_harness()
    harness.submit(good, make_request("bad", [9, 9], max_tokens=12))
    execute = harness.runner.execute

    def spoil(items, chosen=None):  # type: ignore[no-untyped-def]
        logits = execute(items, chosen)
        for row, item in enumerate(items):
            if item.sequence_id == "bad" and item.end >= 5:
                logits[row] = torch.nan
        return logits

    harness.runner.execute = spoil  # type: ignore[method-assign]
    harness.run()
    harness.check_outputs([good])
    assert len(harness.tokens["bad"]) == 3
    assert "bad" in harness.errors
    assert harness.num_free_blocks == 64


def test_a_pool_too_small_for_all_preempts_between_steps_and_gives_the_same_tokens() -> None:
    requests = [make_request(name, [*PROMPT, index], max_tokens=25) for index, name in enumerate("abcd")]
    harness = make_harness(num_blocks=14)
    harness.submit(*requests)
    for _ in range(300):
        harness.step()
    harness.check_outputs(requests)
    assert harness.engine.stats.num_preemptions > 0
    assert harness.num_free_blocks == 14
