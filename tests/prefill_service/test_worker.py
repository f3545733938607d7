from __future__ import annotations

import asyncio

import pytest

from prefill_service.worker import HandoffChoice
from tests.fakes.async_engine import EOS, counting_pair, expected_tokens
from tests.fakes.worker_pair import DECODE, PREFILL, WorkerPair, until, within
from weir.cluster.block_ownership import BlockGroup, HoldingKind
from weir.core.deadline import Deadline
from weir.core.errors import (
    CapacityExceededError,
    ConflictError,
    DeadlineExceededError,
    HandoffLostError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    WrongIncarnationError,
)
from weir.core.request import FinishReason, HandoffId, HandoffKey, RequestId, SamplingParams
from weir.core.worker import Incarnation

PROMPT = tuple(range(5, 40))  # 9 blocks of 4, in three steps of at most 16 tokens
OTHER_PROMPT = tuple(range(105, 140))
NUM_BLOCKS = 9
NUM_STEPS = 3


async def fetch_late(pair: WorkerPair, key: HandoffKey) -> object:
    """What a decode worker hears that comes for `key` only now."""
    request, _ = pair.request(PROMPT)
    stream = pair.gateway.open(request, key, pair.source)
    await within(stream.ended.wait())
    return stream.error


async def test_every_choice_gets_its_first_token_from_one_computation() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        other = HandoffKey(HandoffId(f"{key.handoff_id}x"), 0)
        result = await within(pair.start_prefill(request, key, other))
        expected = expected_tokens(PROMPT, 1)[0]
        assert [(token.choice_index, token.token_id) for token in result.first_tokens] == [(0, expected), (1, expected)]
        assert pair.prefill_engine.stats().num_prompt_tokens == len(PROMPT)
        assert (pair.prefill.num_held, pair.prefill.num_held_blocks) == (2, NUM_BLOCKS)
        assert pair.prefill.release([key, other]) == 2
        await pair.assert_at_rest()


async def test_a_call_that_means_another_start_of_the_process_is_refused() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        choice = HandoffChoice(choice_index=0, key=key, decode_incarnation=DECODE)
        with pytest.raises(WrongIncarnationError) as caught:
            await pair.prefill.prefill(request, (choice,), incarnation=Incarnation("prefill-0"))
        assert caught.value.hop == "prefill"
        await pair.assert_at_rest()


async def test_a_prefill_needs_a_choice() -> None:
    async with counting_pair() as pair:
        request, _ = pair.request(PROMPT)
        with pytest.raises(InvalidRequestError):
            await pair.prefill.prefill(request, (), incarnation=PREFILL)
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_steps", range(NUM_STEPS))
async def test_cancelling_at_any_step_frees_everything(num_steps: int) -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        task = pair.group.create_task(pair.start_prefill(request, key))
        await until(lambda: runner.num_steps_begun == 1)
        runner.allow(num_steps)
        await until(lambda: runner.num_steps_begun == 1 + num_steps)
        task.cancel()
        await asyncio.wait([task])
        runner.run_freely()
        await pair.assert_at_rest()
        assert runner.num_steps_begun <= 2 + num_steps, "the computation went on after it was cancelled"
        assert isinstance(await fetch_late(pair, key), HandoffLostError)


@pytest.mark.parametrize("is_released", [False, True], ids=["aborted", "released"])
@pytest.mark.parametrize("num_steps", range(NUM_STEPS))
async def test_an_end_by_name_at_any_step_ends_the_call_and_frees_everything(num_steps: int, is_released: bool) -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        other = HandoffKey(HandoffId("other"), 0)

        async def prefill() -> None:
            with pytest.raises(RequestCancelledError):
                await pair.start_prefill(request, key, other)

        async with asyncio.TaskGroup() as group:
            group.create_task(prefill())
            await until(lambda: runner.num_steps_begun == 1)
            runner.allow(num_steps)
            await until(lambda: runner.num_steps_begun == 1 + num_steps)
            if is_released:
                assert pair.prefill.release([key, other]) == 2
            else:
                assert pair.prefill.abort(RequestId("another")) == 0
                assert pair.prefill.abort(request.request_id) == 2
        runner.run_freely()
        await pair.assert_at_rest()
        assert runner.num_steps_begun <= 2 + num_steps, "the computation went on after its end"


async def test_a_prompt_is_computed_while_one_choice_still_wants_it() -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        other = HandoffKey(HandoffId("other"), 0)

        async def prefill() -> None:
            assert len((await pair.start_prefill(request, key, other)).first_tokens) == 2

        async with asyncio.TaskGroup() as group:
            group.create_task(prefill())
            await until(lambda: runner.num_steps_begun == 1)
            assert pair.prefill.release([key]) == 1
            runner.run_freely()
        assert pair.prefill.num_held == 1
        assert pair.prefill.release([other]) == 1
        await pair.assert_at_rest()


async def test_a_release_that_overtakes_its_call_ends_it() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        assert pair.prefill.release([key]) == 0
        with pytest.raises(ConflictError):
            await pair.start_prefill(request, key)
        await pair.assert_at_rest()
        again, newer = pair.request(PROMPT, epoch=key.epoch + 1)
        await within(pair.start_prefill(again, HandoffKey(key.handoff_id, newer.epoch)))
        assert pair.prefill.release([HandoffKey(key.handoff_id, newer.epoch)]) == 1
        await pair.assert_at_rest()


async def test_aborting_a_computed_prompt_ends_its_holds_and_a_late_fetch_is_refused_by_name() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        assert pair.prefill.abort(request.request_id) == 1
        await pair.assert_at_rest()
        error = await fetch_late(pair, key)
        assert isinstance(error, HandoffLostError)
        assert error.hop == "transfer"
        await pair.assert_at_rest()


async def test_a_release_ends_its_epoch_and_older_ones_but_not_newer_ones() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, epoch=3)
        await within(pair.start_prefill(request, key))
        assert pair.prefill.release([HandoffKey(key.handoff_id, 2)]) == 0
        assert pair.prefill.num_held == 1
        assert pair.prefill.release([HandoffKey(key.handoff_id, 4)]) == 1
        assert pair.prefill.release([key]) == 0
        await pair.assert_at_rest()


async def test_a_newer_epoch_ends_the_older_one() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, request_id="again")
        await within(pair.start_prefill(request, key))
        request, newer = pair.request(PROMPT, request_id="again", epoch=1)
        await within(pair.start_prefill(request, newer))
        assert pair.prefill.num_held == 1
        assert isinstance(await fetch_late(pair, key), HandoffLostError)
        assert pair.prefill.release([newer]) == 1
        await pair.assert_at_rest()


async def test_an_epoch_that_is_offered_twice_is_refused_and_the_first_stays() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        again, _ = pair.request(OTHER_PROMPT)
        with pytest.raises(ConflictError):
            await pair.start_prefill(again, key)
        assert (pair.prefill.num_held, pair.prefill.num_held_blocks) == (1, NUM_BLOCKS)
        stream = pair.gateway.open(request, key, pair.source)
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        await pair.assert_at_rest()


async def test_a_lease_that_ends_frees_the_blocks_and_a_late_fetch_is_told_so() -> None:
    async with counting_pair(lease_s=0.2) as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        assert pair.prefill_engine.stats().held_blocks == NUM_BLOCKS
        await pair.assert_at_rest()
        assert pair.server.stats.leases_expired_total == 1
        error = await fetch_late(pair, key)
        assert isinstance(error, HandoffLostError)
        assert "expired" in error.message


async def test_renewing_names_what_is_lost() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        gone = HandoffKey(key.handoff_id, 7)
        assert pair.prefill.renew([key, gone]) == (gone,)
        pair.prefill.release([key])
        assert pair.prefill.renew([key]) == (key,)


async def test_only_the_bound_decode_worker_may_fetch_until_the_gateway_rebinds() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key, decode=Incarnation("decode-0")))
        stream = pair.gateway.open(request, key, pair.source)  # from decode-1: waits for the binding
        await within(stream.answered.wait())
        pair.prefill.rebind(key, DECODE)
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        with pytest.raises(HandoffLostError):
            pair.prefill.rebind(key, DECODE)
        await pair.assert_at_rest()


@pytest.mark.parametrize(
    ("sampling", "finish_reason"),
    [
        (SamplingParams(temperature=0.0, max_tokens=1), FinishReason.LENGTH),
        (
            SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=expected_tokens(PROMPT, 1)),
            FinishReason.STOP,
        ),
        (SamplingParams(temperature=0.0, max_tokens=9, logit_bias=((EOS, 100.0),)), FinishReason.STOP),
    ],
)
async def test_a_choice_that_its_first_token_finished_frees_at_once(
    sampling: SamplingParams, finish_reason: FinishReason
) -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, sampling)
        result = await within(pair.start_prefill(request, key))
        assert result.first_tokens[0].finish_reason is finish_reason
        assert pair.prefill.num_held == 0
        await pair.assert_at_rest()


async def test_a_prompt_waits_until_enough_held_blocks_are_free() -> None:
    async with counting_pair(max_held_blocks=NUM_BLOCKS) as pair:
        first, first_key = pair.request(PROMPT)
        await within(pair.start_prefill(first, first_key))
        second, second_key = pair.request(OTHER_PROMPT)
        task = pair.group.create_task(pair.start_prefill(second, second_key))
        await until(lambda: pair.prefill.num_waiting == 1)
        assert pair.prefill.queued_tokens == len(OTHER_PROMPT)
        assert pair.prefill.release([first_key]) == 1
        await within(task)
        assert (pair.prefill.num_waiting, pair.prefill.num_held_blocks) == (0, NUM_BLOCKS)
        assert pair.prefill.queued_tokens == 0
        pair.prefill.release([second_key])
        await pair.assert_at_rest()


async def test_a_fetch_that_comes_while_its_prompt_waits_for_held_blocks_is_not_lost() -> None:
    async with counting_pair(max_held_blocks=NUM_BLOCKS) as pair:
        first, first_key = pair.request(PROMPT)
        await within(pair.start_prefill(first, first_key))
        second, second_key = pair.request(OTHER_PROMPT)
        stream = pair.gateway.open(second, second_key, pair.source)
        task = pair.group.create_task(pair.start_prefill(second, second_key))
        await until(lambda: pair.prefill.num_waiting == 1 and pair.client.num_in_flight == 1)
        pair.prefill.release([first_key])
        await within(task)
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(OTHER_PROMPT, 8)
        await pair.assert_at_rest()


async def test_a_hold_that_ends_before_its_prompt_is_computed_leaves_no_block_behind() -> None:
    async with counting_pair(max_held_blocks=NUM_BLOCKS) as pair:
        first, first_key = pair.request(PROMPT)
        await within(pair.start_prefill(first, first_key))
        second, second_key = pair.request(OTHER_PROMPT)
        other_key = HandoffKey(HandoffId(f"{second_key.handoff_id}x"), 0)
        task = pair.group.create_task(pair.start_prefill(second, second_key, other_key))
        await until(lambda: pair.prefill.num_waiting == 1)
        assert pair.prefill.release([second_key]) == 1
        assert pair.prefill.release([first_key]) == 1
        result = await within(task)
        assert len(result.first_tokens) == 2
        assert pair.prefill.release([other_key]) == 1
        await pair.assert_at_rest()


async def test_a_wait_for_held_blocks_is_bounded() -> None:
    async with counting_pair(max_held_blocks=NUM_BLOCKS, max_queue_s=0.05, max_waiting=1) as pair:
        first, first_key = pair.request(PROMPT)
        await within(pair.start_prefill(first, first_key))
        second, second_key = pair.request(OTHER_PROMPT)
        with pytest.raises(OverloadedError) as caught:
            await within(pair.start_prefill(second, second_key))
        assert caught.value.hop == "prefill"
        assert caught.value.retry_after_s
        pair.prefill.release([first_key])
        await pair.assert_at_rest()


async def test_a_prompt_above_the_limit_of_held_blocks_is_refused_by_name() -> None:
    async with counting_pair(max_held_blocks=NUM_BLOCKS - 1) as pair:
        request, key = pair.request(PROMPT)
        with pytest.raises(CapacityExceededError, match="max_held_blocks"):
            await pair.start_prefill(request, key)
        await pair.assert_at_rest()


async def test_a_deadline_that_passes_ends_the_prefill() -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT, deadline=Deadline.after(0.05))
        with pytest.raises(DeadlineExceededError) as caught:
            await within(pair.start_prefill(request, key))
        assert caught.value.hop == "prefill"
        runner.run_freely()
        await pair.assert_at_rest()


async def test_draining_refuses_new_prompts_and_waits_for_the_last_lease() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        drain = pair.group.create_task(pair.prefill.drain(20.0))
        await until(lambda: pair.prefill.is_draining)
        other, other_key = pair.request(OTHER_PROMPT)
        with pytest.raises(UnavailableError) as caught:
            await pair.start_prefill(other, other_key)
        assert caught.value.retry_after_s
        assert not drain.done()
        stream = pair.gateway.open(request, key, pair.source)
        assert await within(drain)
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)


async def test_a_drain_is_bounded() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        assert not await within(pair.prefill.drain(0.02))


async def test_holds_are_mirrored_while_they_last() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        name = (request.request_id, key, HoldingKind.SOURCE)
        assert pair.ownership.holdings == {name: (BlockGroup(first_block=0, num_blocks=NUM_BLOCKS),)}
        pair.prefill.release([key])
        await until(lambda: not pair.ownership.holdings)


async def test_an_engine_that_refuses_a_prompt_leaves_nothing_behind() -> None:
    async with counting_pair() as pair:
        request, key = pair.request((5000,))  # outside the vocabulary
        with pytest.raises(InvalidRequestError):
            await within(pair.start_prefill(request, key))
        await pair.assert_at_rest()
