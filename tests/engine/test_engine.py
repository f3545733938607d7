"""Engine: the same tokens however a sequence was computed, and every ending leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.model_runner import VOCAB_SIZE, expected_output, make_request, prompt_logits
from weir.core.deadline import Deadline
from weir.core.errors import (
    CapacityExceededError,
    ConflictError,
    ContextLengthError,
    DeadlineExceededError,
    HopFailedError,
    InvalidRequestError,
    RequestCancelledError,
    RequestNotFoundError,
    UnsupportedFeatureError,
)
from weir.core.request import FinishReason, FirstToken, SequenceRequest
from weir.engine.batch import Batch, ScheduledSequence
from weir.engine.claim import Denial, Grant
from weir.engine.logprobs import launch_logprobs

PROMPT = tuple((7 * index) % VOCAB_SIZE for index in range(37))
SAMPLED: dict[str, object] = {
    "temperature": 0.8,
    "seed": 11,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
}


@pytest.fixture(autouse=True, params=[False, True], ids=["", "ahead"])
def _runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every law here holds also where a step is launched before the results of the one before are taken."""
    monkeypatch.setattr(EngineHarness, "runs_ahead", request.param)


@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 11, 500])
def test_chunked_equals_unchunked(sampling: dict[str, object], block_size: int, max_num_batched_tokens: int) -> None:
    harness = EngineHarness(
        block_size=block_size, num_blocks=400 // block_size + 4, max_num_batched_tokens=max_num_batched_tokens
    )
    requests = [make_request(f"s{i}", PROMPT[i:], max_tokens=9, **sampling) for i in range(5)]
    harness.submit(*requests)
    harness.run()
    harness.check_outputs(requests)
    assert harness.num_free_blocks == harness.runner.num_blocks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16, 37])
def test_prefix_hit_gives_the_same_tokens(length: int) -> None:
    harness = EngineHarness()
    first = make_request("cold", PROMPT[:length], max_tokens=12, **SAMPLED)
    harness.submit(first)
    harness.run()
    again = make_request("hot", PROMPT[:length], max_tokens=12, **SAMPLED)
    harness.submit(again)
    harness.run()
    harness.check_outputs([first, again])
    # At least one prompt token is computed for its logits; the rest comes in whole blocks.
    assert (harness.cached["cold"], harness.cached["hot"]) == (0, (length - 1) // 4 * 4)


def test_output_is_a_prefix_for_the_next_turn() -> None:
    harness = EngineHarness()
    first = make_request("turn-1", PROMPT[:10], max_tokens=15)
    harness.submit(first)
    harness.run()
    longer = make_request("turn-2", [*PROMPT[:10], *harness.tokens["turn-1"], 5, 6], max_tokens=4)
    harness.submit(longer)
    harness.run()
    harness.check_outputs([longer])
    assert harness.cached["turn-2"] == 24


def test_preempted_sequences_give_the_same_tokens_once() -> None:
    harness = EngineHarness(num_blocks=20, max_num_seqs=6)
    requests = [
        make_request(f"s{i}", PROMPT[i : i + 6], max_tokens=40, logprobs=1, **(SAMPLED if i % 2 else {}))
        for i in range(6)
    ]
    harness.submit(*requests)
    harness.run()
    assert harness.engine.stats.num_preemptions > 0
    harness.check_outputs(requests)
    assert all(len(harness.logprobs[request.sequence_id]) == 40 for request in requests)
    assert harness.num_free_blocks == 20


def test_preempted_without_prefix_cache_gives_the_same_tokens() -> None:
    harness = EngineHarness(num_blocks=20, max_num_seqs=6, enable_prefix_caching=False)
    requests = [make_request(f"s{i}", PROMPT[i : i + 6], max_tokens=40, **SAMPLED) for i in range(6)]
    harness.submit(*requests)
    harness.run()
    assert harness.engine.stats.num_preemptions > 0
    harness.check_outputs(requests)
    assert harness.engine.kv_snapshot() == ()
    assert harness.engine.stats.prefix_cache_queries == 0


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_resumed_output_continues_as_if_it_had_never_stopped(cut: int) -> None:
    whole = make_request("whole", PROMPT[:9], max_tokens=12, min_tokens=7, logit_bias=((3, 1.5),), **SAMPLED)
    output, _ = expected_output(whole)
    harness = EngineHarness()
    rest = make_request(
        "rest", PROMPT[:9], resumed=output[:cut], max_tokens=12, min_tokens=7, logit_bias=((3, 1.5),), **SAMPLED
    )
    harness.submit(rest)
    harness.run()
    assert harness.tokens["rest"] == output[cut:]


def test_stop_token_ends_and_is_the_last_token() -> None:
    requests = (make_request("s", PROMPT[:length], max_tokens=60, ignore_eos=False) for length in range(1, 30))
    request = next(request for request in requests if expected_output(request)[1] is FinishReason.STOP)
    harness = EngineHarness()
    harness.submit(request)
    harness.run()
    harness.check_outputs([request])
    assert harness.tokens["s"][-1] == 2


def test_adapter_and_salt_keep_prefixes_apart() -> None:
    harness = EngineHarness()
    for name, salt in (("a", ""), ("b", "salt"), ("c", "salt")):
        harness.submit(make_request(name, PROMPT[:16], max_tokens=2, cache_salt=salt))
        harness.run()
    assert harness.cached == {"a": 0, "b": 0, "c": 12}


def test_prompt_logprobs_do_not_depend_on_chunks_or_cached_prefixes() -> None:
    logits = prompt_logits(PROMPT)
    expected = launch_logprobs(logits[:-1], PROMPT[1:], [3] * (len(PROMPT) - 1)).collect()
    harness = EngineHarness(max_num_batched_tokens=10)
    harness.submit(make_request("warm", PROMPT, max_tokens=1))
    harness.run()
    harness.submit(make_request("asked", PROMPT, max_tokens=3, prompt_logprobs=3))
    harness.submit(make_request("beside", PROMPT[5:], max_tokens=3))
    harness.run()
    assert tuple(harness.prompt_logprobs["asked"]) == expected
    assert harness.prompt_logprobs["beside"] == []
    assert harness.cached["asked"] == 0


def test_prompt_logprobs_survive_preemption_and_come_once() -> None:
    harness = EngineHarness(num_blocks=14, max_num_seqs=4)
    requests = [make_request(f"s{i}", PROMPT[i : i + 7], max_tokens=30, prompt_logprobs=0) for i in range(4)]
    harness.submit(*requests)
    harness.run()
    assert harness.engine.stats.num_preemptions > 0
    harness.check_outputs(requests)
    for request in requests:
        prompt = request.prompt_token_ids
        expected = launch_logprobs(prompt_logits(prompt)[:-1], prompt[1:], [0] * (len(prompt) - 1)).collect()
        assert tuple(harness.prompt_logprobs[request.sequence_id]) == expected


@pytest.mark.parametrize(
    ("request_fields", "error"),
    [
        ({"prompt": []}, InvalidRequestError),
        ({"prompt": [VOCAB_SIZE]}, InvalidRequestError),
        ({"prompt": [-1]}, InvalidRequestError),
        ({"prompt": [1], "max_tokens": 4096}, ContextLengthError),
        ({"prompt": [1], "max_tokens": 300}, CapacityExceededError),
        ({"prompt": [1], "logit_bias": ((VOCAB_SIZE, 1.0),)}, InvalidRequestError),
        ({"prompt": [1], "allowed_token_ids": ()}, InvalidRequestError),
        ({"prompt": [1], "allowed_token_ids": (VOCAB_SIZE,)}, InvalidRequestError),
        ({"prompt": [1], "stop_token_ids": (VOCAB_SIZE,)}, InvalidRequestError),
        ({"prompt": [1], "bad_words_token_ids": ((),)}, InvalidRequestError),
        ({"prompt": [1], "temperature": -1.0}, InvalidRequestError),
        ({"prompt": [1], "temperature": float("nan")}, InvalidRequestError),
        ({"prompt": [1], "top_p": 0.0}, InvalidRequestError),
        ({"prompt": [1], "top_p": -1.0}, InvalidRequestError),
        ({"prompt": [1], "top_k": -1}, InvalidRequestError),
        ({"prompt": [1], "min_p": 7.0}, InvalidRequestError),
        ({"prompt": [1], "repetition_penalty": 0.0}, InvalidRequestError),
        ({"prompt": [1], "presence_penalty": float("inf")}, InvalidRequestError),
        ({"prompt": [1], "resumed": [1, 2], "max_tokens": 2}, InvalidRequestError),
        ({"prompt": [1], "adapter": "x"}, UnsupportedFeatureError),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    request_fields: dict[str, object], error: type[InvalidRequestError]
) -> None:
    harness = EngineHarness()
    request = make_request("s", **request_fields)  # type: ignore[arg-type]
    for intake in (harness.submit, lambda request: harness.engine.claim(request, "s")):
        with pytest.raises(error):
            intake(request)
    assert harness.engine.stats.num_waiting == 0
    harness.engine.check_integrity()


def test_refusals_name_need_and_capacity() -> None:
    harness = EngineHarness()
    with pytest.raises(CapacityExceededError, match=r"needs 75 KV blocks of 4 tokens; the worker has 64"):
        harness.submit(make_request("s", [1], max_tokens=300))
    with pytest.raises(
        ContextLengthError, match=r"context is 4096 tokens; the prompt has 2 and max_tokens asks for 4095"
    ):
        harness.submit(make_request("s", [1, 1], max_tokens=4095))


def test_largest_sequence_that_fits_is_accepted() -> None:
    harness = EngineHarness(num_blocks=4)
    request = make_request("s", [1], max_tokens=16)  # the KV of the last token is never computed
    harness.submit(request)
    harness.run()
    harness.check_outputs([request])


def test_second_sequence_of_the_same_id_is_refused() -> None:
    harness = EngineHarness()
    request = make_request("s", PROMPT, max_tokens=3)
    harness.submit(request)
    with pytest.raises(ConflictError):
        harness.submit(request)
    harness.run()
    harness.submit(request)
    harness.tokens.clear()
    harness.finish.clear()
    harness.run()
    harness.check_outputs([request])


class TestAbort:
    def test_waiting_running_and_unknown(self) -> None:
        harness = EngineHarness(max_num_seqs=1)
        harness.submit(make_request("running", PROMPT, max_tokens=50), make_request("waiting", PROMPT, max_tokens=5))
        harness.step(3)
        for name in ("waiting", "running", "unknown", "running"):
            harness.engine.abort(name)
            harness.engine.check_integrity()
        harness.run()
        assert harness.finish == {}
        assert harness.num_free_blocks == 64

    def test_between_the_chunks_of_a_prompt(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=8)
        harness.submit(make_request("s", PROMPT, max_tokens=5))
        harness.step()
        harness.engine.abort("s")
        harness.run()
        assert harness.num_free_blocks == 64
        assert harness.runner.steps == [(1, 8)]


class TestDeadline:
    def test_ends_sequences_in_every_state(self) -> None:
        harness = EngineHarness(max_num_seqs=3)
        soon = Deadline(2.5)
        assert isinstance(harness.engine.claim(make_request("claimed", PROMPT, deadline=soon), "claimed"), Grant)
        assert isinstance(harness.engine.claim(make_request("import", PROMPT, deadline=soon), "import"), Grant)
        harness.engine.allocate_claimed("import")
        harness.submit(make_request("running", PROMPT, max_tokens=40, deadline=soon))
        harness.submit(make_request("waiting", PROMPT, max_tokens=40, deadline=soon))
        harness.step(2)
        assert harness.errors == {}
        harness.step(2)
        assert set(harness.errors) == {"claimed", "import", "running", "waiting"}
        assert all(isinstance(error, DeadlineExceededError) for error in harness.errors.values())
        assert harness.num_free_blocks < 64, "the import's blocks may still be written"
        harness.engine.release_claim("import")
        harness.engine.update_stats()
        assert harness.num_free_blocks == 64

    def test_engine_says_when_the_next_one_is(self) -> None:
        harness = EngineHarness()
        assert harness.engine.seconds_to_deadline() is None
        harness.submit(make_request("a", PROMPT, deadline=Deadline(9.0)))
        harness.submit(make_request("b", PROMPT, deadline=Deadline(4.0)))
        assert harness.engine.seconds_to_deadline() == 4.0
        harness.engine.abort("b")
        assert harness.engine.seconds_to_deadline() == 9.0


def refuse_poison(batch: Batch) -> None:
    """Of a runner that cannot compute token 47."""
    if (batch.input_ids == 47).any():
        raise RuntimeError("no such token")


class TestErrors:
    def test_sequence_that_breaks_the_model_fails_alone(self) -> None:
        harness = EngineHarness()

        harness.runner.before_execute = refuse_poison
        good = [make_request(f"s{i}", [i + 1] * 9, max_tokens=3) for i in range(3)]
        assert all(47 not in expected_output(request)[0] for request in good)
        harness.submit(*good, make_request("poison", [47], max_tokens=3))
        harness.run()
        harness.check_outputs(good)
        assert isinstance(harness.errors["poison"], HopFailedError)
        assert harness.errors["poison"].hop == "decode"
        assert harness.num_free_blocks == 64

    def test_logits_that_are_not_numbers_give_no_token(self) -> None:
        harness = EngineHarness()
        execute = harness.runner.execute

        def spoil(items: Sequence[ScheduledSequence], chosen: torch.Tensor | None = None) -> torch.Tensor:
            logits = execute(items, chosen)
            logits[[row for row, item in enumerate(items) if item.token_ids[-1] == 47], 3] = torch.nan
            return logits

        harness.runner.execute = spoil  # type: ignore[method-assign]
        good = make_request("good", [1, 2, 3], max_tokens=1)
        harness.submit(good, make_request("nan", [47], max_tokens=3), make_request("nan-t", [47], temperature=1.0))
        harness.run()
        harness.check_outputs([good])
        assert set(harness.errors) == {"nan", "nan-t"}

    def test_model_that_computes_nothing_ends_the_engine(self) -> None:
        harness = EngineHarness()

        def refuse(batch: Batch) -> None:
            raise RuntimeError("device lost")

        harness.runner.before_execute = refuse
        for name in ("a", "b"):
            harness.submit(make_request(name, PROMPT))
            harness.run()
        harness.submit(make_request("c", PROMPT))
        with pytest.raises(HopFailedError, match="nothing could be computed in 3 steps"):
            harness.run()

    def test_request_that_breaks_the_model_again_and_again_does_not_end_the_engine(self) -> None:
        harness = EngineHarness()

        harness.runner.before_execute = refuse_poison
        for number in range(7):
            harness.submit(make_request(f"poison{number}", [1, 2, 47]))
            harness.run()
        assert len(harness.errors) == 7
        good = make_request("good", [1, 2, 3], max_tokens=3)
        harness.submit(good)
        harness.run()
        harness.check_outputs([good])
        assert harness.num_free_blocks == 64

    def test_fail_all_tells_everybody_and_says_why(self) -> None:
        harness = EngineHarness()
        harness.submit(make_request("a", PROMPT))
        harness.prefill(make_request("p", PROMPT), 0)
        harness.engine.fail_all(HopFailedError("broken"))
        assert set(harness.errors) == {"a", "p"}
        assert harness.engine.stats.failure == "broken"


class TestPrefill:
    def test_one_computation_gives_each_choice_its_own_first_token(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=16)
        request = make_request("p", PROMPT, max_tokens=5, **SAMPLED)
        harness.prefill(request, 0, 3, 9)
        harness.run()
        assert [item.num_computed_tokens for item in harness.progress["p"]] == [16, 32, 37]
        first_tokens = harness.progress["p"][-1].first_tokens
        assert first_tokens is not None
        for token, index in zip(first_tokens, (0, 3, 9), strict=True):
            alone = make_request("alone", PROMPT, choice_index=index, max_tokens=5, **SAMPLED)
            assert (token.choice_index, token.token_id) == (index, expected_output(alone)[0][0])
        assert sum(tokens for _, tokens in harness.runner.steps) == 37

    def test_holds_outlive_the_run_and_end_one_by_one(self) -> None:
        harness = EngineHarness()
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0, 1)
        harness.run()
        assert harness.engine.stats.held_blocks == 10
        for hold_id, held in (("p#0", 10), ("p#0", 10), ("unknown", 10), ("p#1", 0)):
            harness.engine.release_hold(hold_id)
            harness.engine.update_stats()
            harness.engine.check_integrity()
            assert harness.engine.stats.held_blocks == held
        assert harness.num_free_blocks == 64

    def test_choice_that_its_first_token_finished_is_held_until_its_transfer_has_ended(self) -> None:
        harness = EngineHarness()
        harness.prefill(make_request("p", PROMPT, max_tokens=1), 0, 1)
        harness.run()
        first_tokens = harness.progress["p"][-1].first_tokens
        assert first_tokens is not None
        assert {token.finish_reason for token in first_tokens} == {FinishReason.LENGTH}
        assert harness.num_free_blocks == 54
        harness.engine.release_hold("p#0")
        harness.engine.release_hold("p#1")
        harness.engine.update_stats()
        assert harness.num_free_blocks == 64

    def test_aborted_run_leaves_its_holds(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=8)
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0)
        harness.step(2)
        harness.engine.abort("p")
        harness.engine.check_integrity()
        harness.run()
        assert harness.engine.stats.held_blocks == 10
        harness.engine.release_hold("p#0")
        harness.engine.check_integrity()

    def test_hold_released_while_waiting_or_running_is_not_taken(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=8)
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0, 1)
        harness.engine.release_hold("p#0")
        harness.step()
        harness.engine.release_hold("p#1")
        harness.run()
        assert harness.num_free_blocks == 64

    def test_cached_prefix_is_reported_before_anything_is_computed(self) -> None:
        harness = EngineHarness()
        harness.submit(make_request("warm", PROMPT, max_tokens=1))
        harness.run()
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0)
        heard: list[int] = []
        harness.runner.before_execute = lambda batch: heard.append(harness.progress["p"][-1].num_computed_tokens)
        harness.step()
        assert heard == [36]
        assert harness.progress["p"][-1].num_cached_tokens == 36

    def test_is_never_preempted(self) -> None:
        harness = EngineHarness(num_blocks=24, max_num_batched_tokens=8)
        decoding = [make_request(f"s{i}", PROMPT[i : i + 4], max_tokens=30) for i in range(3)]
        harness.submit(*decoding)
        harness.step(4)
        harness.prefill(make_request("p", PROMPT, max_tokens=5, priority=9), 0)
        harness.step()
        blocks = harness.progress["p"][-1].block_ids
        harness.run()
        assert harness.engine.stats.num_preemptions > 0
        assert {item.block_ids for item in harness.progress["p"]} == {blocks}
        harness.check_outputs(decoding)

    def test_times_are_of_queue_and_computation(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=8, max_num_seqs=1, runs_ahead=False)
        harness.submit(make_request("before", PROMPT[:3], max_tokens=2))
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0)
        harness.run()
        last = harness.progress["p"][-1]
        assert (last.queue_s, last.prefill_s) == (3.0, 4.0)

    def test_hold_id_in_use_is_refused(self) -> None:
        harness = EngineHarness()
        harness.prefill(make_request("p", PROMPT, max_tokens=5), 0)
        with pytest.raises(ConflictError, match="hold"):
            harness.engine.prefill(make_request("q", PROMPT), harness.engine._sequences["p"].choices, "q")
        harness.engine.check_integrity()


class TestHandoff:
    """Two engines; the test itself plays the transfer."""

    def prefill(self, request: SequenceRequest) -> tuple[EngineHarness, FirstToken]:
        source = EngineHarness()
        source.prefill(request, request.choice_index)
        source.run()
        first_tokens = source.progress[request.sequence_id][-1].first_tokens
        assert first_tokens is not None
        return source, first_tokens[0]

    def move(self, request: SequenceRequest, source: EngineHarness, target: EngineHarness) -> None:
        destination = target.engine.allocate_claimed(request.sequence_id)
        blocks = source.progress[request.sequence_id][-1].block_ids
        assert len(destination.block_ids) == len(blocks)
        for index in range(destination.num_cached_tokens // 4, len(blocks)):
            view = target.runner.cache.block_view(destination.block_ids[index])
            view[:] = source.runner.cache.block_view(blocks[index])

    @pytest.mark.parametrize("length", [1, 4, 15, 16, 37])
    @pytest.mark.parametrize("sampling", [{}, SAMPLED])
    def test_disaggregated_tokens_equal_monolithic_tokens(self, length: int, sampling: dict[str, object]) -> None:
        request = make_request("s", PROMPT[:length], max_tokens=14, choice_index=2, **sampling)
        source, first = self.prefill(request)
        target = EngineHarness()
        neighbour = make_request("n", PROMPT[3:20], max_tokens=20)
        target.submit(neighbour)
        target.step(2)
        answer = target.engine.claim(request, "s")
        assert isinstance(answer, Grant)
        target.step()
        self.move(request, source, target)
        target.step()
        target.engine.activate("s", first, 0)
        target.run()
        target.check_outputs([request, neighbour])
        assert target.engine.stats.num_imported_tokens == length
        source.engine.release_hold("s#2")
        source.engine.update_stats()
        assert source.num_free_blocks == target.num_free_blocks == 64

    def test_imported_blocks_become_prefix_cache(self) -> None:
        request = make_request("s", PROMPT, max_tokens=4)
        source, first = self.prefill(request)
        target = EngineHarness()
        target.engine.claim(request, "s")
        self.move(request, source, target)
        assert target.engine.kv_snapshot() == ()
        target.engine.activate("s", first, 0)
        target.run()
        again = make_request("again", PROMPT, max_tokens=4)
        answer = target.engine.claim(again, "again")
        assert answer == Grant(num_cached_tokens=36, num_claimed_blocks=1)
        source, first = self.prefill(again)
        self.move(again, source, target)
        target.engine.activate("again", first, 0)
        target.run()
        target.check_outputs([request, again])

    def test_blocks_that_came_since_the_claim_are_shared(self) -> None:
        request, sibling = (make_request(name, PROMPT, max_tokens=4) for name in ("s", "sibling"))
        target = EngineHarness()
        assert target.engine.claim(request, "s") == Grant(num_cached_tokens=0, num_claimed_blocks=10)
        assert target.engine.claim(sibling, "sibling") == Grant(num_cached_tokens=0, num_claimed_blocks=10)
        for item in (request, sibling):
            source, first = self.prefill(item)
            self.move(item, source, target)
            target.engine.activate(item.sequence_id, first, 0)
            target.step()
        target.run()
        target.check_outputs([request, sibling])
        assert target.engine.stats.num_prompt_tokens == 0

    def test_full_prefix_hit_needs_no_block_at_all(self) -> None:
        request = make_request("s", PROMPT[:16], max_tokens=4)
        target = EngineHarness()
        target.submit(make_request("warm", [*PROMPT[:16], 1], max_tokens=1))
        target.run()
        assert target.engine.claim(request, "s") == Grant(num_cached_tokens=16, num_claimed_blocks=1)
        destination = target.engine.allocate_claimed("s")
        assert (destination.num_cached_tokens, len(destination.block_ids)) == (16, 4)
        _, first = self.prefill(request)
        target.engine.activate("s", first, 0)
        target.run()
        target.check_outputs([request])

    def test_first_token_that_ends_the_sequence_ends_it(self) -> None:
        target = EngineHarness()
        target.engine.claim(make_request("s", PROMPT, max_tokens=4), "s")
        target.engine.allocate_claimed("s")
        target.engine.activate(
            "s", FirstToken(choice_index=0, token_id=2, finish_reason=FinishReason.STOP, stop_token_id=2), 0
        )
        target.run()
        assert (target.tokens["s"], target.finish["s"]) == ([2], FinishReason.STOP)
        assert target.num_free_blocks == 64

    def test_resumed_sequence_is_handed_off_with_its_output(self) -> None:
        whole = make_request("w", PROMPT[:9], max_tokens=12, **SAMPLED)
        output, _ = expected_output(whole)
        request = make_request("s", PROMPT[:9], resumed=output[:5], max_tokens=12, **SAMPLED)
        source, first = self.prefill(request)
        target = EngineHarness()
        target.engine.claim(request, "s")
        self.move(request, source, target)
        target.engine.activate("s", first, 0)
        target.run()
        assert target.tokens["s"] == output[5:]

    def test_preempted_import_is_recomputed_exactly(self) -> None:
        target = EngineHarness(num_blocks=24)
        others = [make_request(f"o{i}", PROMPT[i : i + 5], max_tokens=40) for i in range(2)]
        target.submit(*others)
        target.step(2)
        request = make_request("s", PROMPT[:20], max_tokens=30, **SAMPLED)
        source, first = self.prefill(request)
        assert isinstance(target.engine.claim(request, "s"), Grant)
        self.move(request, source, target)
        target.engine.activate("s", first, 0)
        target.run()
        assert target.engine.stats.num_preemptions > 0
        target.check_outputs([request, *others])

    def test_claims_are_counted_and_denied_when_blocks_or_seats_are_out(self) -> None:
        target = EngineHarness(num_blocks=21, max_num_seqs=3)
        assert isinstance(target.engine.claim(make_request("a", PROMPT), "a"), Grant)
        target.engine.update_stats()
        assert target.num_free_blocks == 11
        # 10 blocks are left; the watermark of one keeps the next claim out.
        target.submit(make_request("r", [1], max_tokens=2))
        target.step()
        answer = target.engine.claim(make_request("b", PROMPT), "b")
        assert isinstance(answer, Denial)
        assert answer.retry_after_s > 0
        assert isinstance(target.engine.claim(make_request("c", PROMPT[:3]), "c"), Grant)
        assert isinstance(target.engine.claim(make_request("d", PROMPT[:3]), "d"), Denial), "no seat"
        for name in ("a", "c", "c", "unknown"):
            target.engine.release_claim(name)
            target.engine.check_integrity()
        target.run()
        assert target.num_free_blocks == 21

    def test_steps_have_their_share_of_the_time_while_sequences_wait_for_kv(self) -> None:
        target = EngineHarness(compute_share=0.25, runs_ahead=False)
        target.submit(make_request("r", PROMPT[:5], max_tokens=60, ignore_eos=True))
        step_s = 0.016

        def take_time(batch: Batch) -> None:
            target.now_s += step_s

        target.runner.before_execute = take_time
        target.step()
        assert target.engine.rest_s() == 0, "nobody computes for this engine"
        target.engine.claim(make_request("c", PROMPT[:5]), "c")
        assert target.engine.rest_s() == pytest.approx(0.048)
        step_s = 0.05
        target.step()
        assert target.engine.rest_s() == pytest.approx(0.014), "a disturbed step has had part of the rest"
        target.step(8)
        assert target.engine.rest_s() == pytest.approx(0.03), "a token is due after 80 ms"
        step_s = 0.1
        target.step(8)
        assert target.engine.rest_s() == 0
        step_s = 0.016
        target.step()
        assert target.engine.rest_s() == pytest.approx(0.048)
        target.engine.release_claim("c")
        assert target.engine.rest_s() == 0

    def test_claim_does_not_overtake_who_waits_for_blocks(self) -> None:
        target = EngineHarness(num_blocks=19)
        target.submit(make_request("r", [1], max_tokens=70))
        target.step()
        target.submit(make_request("big", [1] * 70, max_tokens=5))
        target.step()
        assert isinstance(target.engine.claim(make_request("c", [1, 2], max_tokens=2), "c"), Denial)
        assert isinstance(target.engine.claim(make_request("u", [1, 2], max_tokens=2, priority=-1), "u"), Grant)

    def test_decoding_never_takes_blocks_that_are_promised_or_imported(self) -> None:
        target = EngineHarness(num_blocks=20)
        request = make_request("s", PROMPT[:29], max_tokens=8)
        assert isinstance(target.engine.claim(request, "s"), Grant)
        others = [make_request(f"o{i}", PROMPT[i : i + 5], max_tokens=28) for i in range(3)]
        target.submit(*others)
        target.step(10)
        source, first = self.prefill(request)
        self.move(request, source, target)
        target.step(10)
        assert target.engine.stats.num_preemptions > 0
        target.engine.activate("s", first, 0)
        target.run()
        target.check_outputs([request, *others])

    def test_aborted_import_keeps_its_blocks_until_nobody_writes(self) -> None:
        target = EngineHarness()
        request = make_request("s", PROMPT)
        target.engine.claim(request, "s")
        target.engine.allocate_claimed("s")
        target.engine.abort("s")
        target.engine.abort("s")
        target.engine.check_integrity()
        target.engine.update_stats()
        assert target.num_free_blocks == 54
        with pytest.raises(ConflictError):
            target.engine.claim(request, "s")
        target.engine.release_claim("s")
        target.engine.release_claim("s")
        target.engine.check_integrity()
        assert isinstance(target.engine.claim(request, "s"), Grant)

    def test_activating_an_aborted_import_frees_it_and_says_so(self) -> None:
        target = EngineHarness()
        target.engine.claim(make_request("s", PROMPT), "s")
        target.engine.allocate_claimed("s")
        target.engine.abort("s")
        with pytest.raises(RequestCancelledError):
            target.engine.activate("s", FirstToken(choice_index=0, token_id=1), 0)
        target.engine.check_integrity()
        target.engine.update_stats()
        assert target.num_free_blocks == 64
        assert target.tokens == {}

    def test_aborted_claim_frees_its_promise(self) -> None:
        target = EngineHarness()
        target.engine.claim(make_request("s", PROMPT), "s")
        target.engine.abort("s")
        target.engine.update_stats()
        assert target.num_free_blocks == 64
        for call in (
            lambda: target.engine.allocate_claimed("s"),
            lambda: target.engine.activate("s", FirstToken(choice_index=0, token_id=1), 0),
        ):
            with pytest.raises(RequestNotFoundError):
                call()

    def test_steps_out_of_order_are_refused(self) -> None:
        target = EngineHarness()
        first = FirstToken(choice_index=0, token_id=1)
        target.engine.claim(make_request("s", PROMPT), "s")
        with pytest.raises(ConflictError):
            target.engine.activate("s", first, 0)
        target.engine.allocate_claimed("s")
        with pytest.raises(ConflictError):
            target.engine.allocate_claimed("s")
        target.engine.activate("s", first, 0)
        with pytest.raises(ConflictError):
            target.engine.release_claim("s")
        target.engine.check_integrity()


class TestFacts:
    def test_counters(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=16)
        for name in ("cold", "hot"):
            harness.submit(make_request(name, PROMPT, max_tokens=3))
            harness.run()
        stats = harness.engine.stats
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (74, 36)
        assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (74, 6)
        assert harness.engine.meter.take_iteration_tokens() == (16, 16, 5, 1, 1, 1, 1, 1)
        assert harness.engine.meter.take_iteration_tokens() == ()
        assert stats.kv_usage == 0

    def test_queued_tokens_fall_as_prompts_are_computed(self) -> None:
        harness = EngineHarness(max_num_batched_tokens=16, max_num_seqs=1, runs_ahead=False)
        harness.submit(make_request("a", PROMPT, max_tokens=3), make_request("b", [5] * 10, max_tokens=3))
        seen = []
        for _ in range(4):
            harness.step()
            seen.append(harness.engine.stats.queued_tokens)
        assert seen == [31, 15, 10, 10]

    def test_last_step_is_not_older_than_the_work(self) -> None:
        harness = EngineHarness()
        harness.run()
        assert not harness.engine.stats.has_work
        harness.now_s = 1000.0
        seen: list[tuple[bool, float]] = []
        harness.runner.before_execute = lambda batch: seen.append(
            (harness.engine.stats.has_work, harness.engine.stats.last_step_ended_s)
        )
        harness.submit(make_request("a", PROMPT, max_tokens=1))
        harness.step()
        assert seen == [(True, 1001.0)]

    def test_engine_whose_sequences_all_wait_for_blocks_has_no_work(self) -> None:
        harness = EngineHarness(num_blocks=12)
        harness.prefill(make_request("p", PROMPT), 0)
        harness.run()
        harness.prefill(make_request("q", [9] * 30), 0)
        harness.run()
        assert (harness.engine.stats.num_waiting, harness.engine.stats.has_work) == (1, False)
        harness.engine.release_hold("p#0")
        harness.run()
        assert harness.progress["q"][-1].first_tokens is not None

    def test_reset_prefix_cache_only_when_nothing_is_in_use(self) -> None:
        harness = EngineHarness()
        harness.submit(make_request("a", PROMPT, max_tokens=3))
        harness.step()
        assert not harness.engine.reset_prefix_cache()
        harness.run()
        assert harness.engine.kv_snapshot()
        assert harness.engine.reset_prefix_cache()
        assert harness.engine.kv_snapshot() == ()
        assert harness.engine.take_kv_events().cleared
