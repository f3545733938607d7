from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from decode_service.events import HandoffSource, OpenSequence
from tests.fakes.async_engine import CountingRunner, counting_pair, expected_tokens
from tests.fakes.worker_pair import DECODE, GREEDY, PREFILL, Gateway, until, within
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
    WorkerLostError,
    WrongIncarnationError,
)
from weir.core.request import FinishReason, HandoffKey
from weir.core.worker import Incarnation, WorkerId

PROMPT = tuple(range(5, 40))  # 9 blocks of 4, in three steps of at most 16 tokens
NUM_BLOCKS = 9
TOKEN_BYTES = 16
LONG = replace(GREEDY, max_tokens=40)


def nobody_listens() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def step_until(runner: CountingRunner, is_so: Callable[[], bool]) -> None:
    """Let a held engine step, between which it takes commands, no further than it must."""
    async with asyncio.timeout(20.0):
        while not is_so():
            runner.allow(1)
            await asyncio.sleep(0.01)


async def test_a_handed_off_sequence_goes_on_from_its_first_token() -> None:
    async with counting_pair() as pair:
        result, (stream,) = await pair.generate(PROMPT)
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        assert stream.token_ids[0] == result.first_tokens[0].token_id
        assert stream.finish_reason is FinishReason.LENGTH
        assert pair.decode_engine.stats().num_prompt_tokens == 0, "the prompt was computed again"
        await pair.assert_at_rest()


async def test_the_timings_of_a_hand_off_come_once_with_the_first_token_made_here() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await stream.has_tokens(1)
        assert stream.timings is None
        runner.allow(1)
        await stream.has_tokens(2)
        timings, stream.timings = stream.timings, None
        assert timings is not None
        assert timings.size_bytes >= len(PROMPT) * TOKEN_BYTES
        assert timings.transfer_s >= timings.exposed_s > 0
        runner.run_freely()
        await within(stream.ended.wait())
        assert stream.timings is None


async def test_without_a_source_the_worker_computes_the_prompt_itself() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, None)
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        assert pair.decode_engine.stats().num_prompt_tokens == len(PROMPT)
        await pair.assert_at_rest()


async def test_resumed_output_is_computed_and_counted_and_not_sent_again() -> None:
    async with counting_pair() as pair:
        whole = expected_tokens(PROMPT, 8)
        request, key = pair.request(PROMPT, resumed_output_token_ids=whole[:3], epoch=1)
        stream = pair.gateway.open(request, key, pair.source)
        stream.token_ids.extend(whole[:3])
        await within(pair.start_prefill(request, key))
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == whole
        await pair.assert_at_rest()


async def test_an_open_that_means_another_start_of_the_process_is_refused() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source, incarnation=Incarnation("decode-0"))
        await within(stream.ended.wait())
        assert isinstance(stream.error, WrongIncarnationError)
        assert stream.error.hop == "decode"
        await pair.assert_at_rest()


async def test_a_full_pool_denies_and_says_when_to_come_back() -> None:
    async with counting_pair(decode={"num_blocks": 12, "max_model_len": 44}) as pair:
        first, first_key = pair.request(PROMPT)
        granted = pair.gateway.open(first, first_key, pair.source)
        await within(granted.answered.wait())
        second, second_key = pair.request(PROMPT)
        denied = pair.gateway.open(second, second_key, pair.source)
        await within(denied.ended.wait())
        assert granted.granted is not None
        assert granted.granted.num_claimed_blocks == NUM_BLOCKS
        assert denied.denied is not None
        assert denied.denied.retry_after_s > 0
        pair.gateway.cancel(granted)
        await pair.assert_at_rest()


async def test_what_can_never_fit_is_refused_by_name() -> None:
    async with counting_pair(decode={"num_blocks": 8, "max_model_len": 32}) as pair:
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(stream.ended.wait())
        assert isinstance(stream.error, (CapacityExceededError, InvalidRequestError))
        await pair.assert_at_rest()


async def test_a_full_line_in_the_engine_refuses() -> None:
    async with counting_pair(decode={"max_num_seqs": 1, "max_num_batched_tokens": 16}, max_waiting=1) as pair:
        pair.decode_engine.runner.hold()
        opened = [pair.gateway.open(*pair.request(PROMPT), None) for _ in range(2)]
        await until(lambda: pair.decode_engine.stats().num_waiting == 1)
        refused = pair.gateway.open(*pair.request(PROMPT), None)
        await within(refused.ended.wait())
        assert isinstance(refused.error, OverloadedError)
        assert refused.error.retry_after_s
        pair.decode_engine.runner.run_freely()
        for stream in opened:
            await within(stream.ended.wait())
            assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)


async def test_a_prefill_worker_that_is_gone_ends_the_stream_with_its_hop_and_frees_the_claim() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        source = HandoffSource(worker_id=WorkerId("p"), incarnation=PREFILL, transfer_address=nobody_listens())
        stream = pair.gateway.open(request, key, source)
        await within(stream.ended.wait())
        assert isinstance(stream.error, WorkerLostError)
        assert stream.error.hop == "transfer"
        await pair.assert_at_rest()


async def test_a_prefill_worker_of_another_start_is_refused() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, replace(pair.source, incarnation=Incarnation("prefill-0")))
        await within(stream.ended.wait())
        assert isinstance(stream.error, WrongIncarnationError)
        await pair.assert_at_rest()


async def test_a_hand_off_with_other_tokens_than_the_sequence_is_refused() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        longer = replace(request, prompt_token_ids=(*PROMPT, 1, 2, 3))
        stream = pair.gateway.open(longer, key, pair.source)
        await within(stream.ended.wait())
        assert stream.error is not None
        assert stream.error.code == "transfer_protocol_error"
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_steps", range(4))
async def test_cancelling_while_the_prompt_is_computed_frees_both_sides(num_steps: int) -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        task = pair.group.create_task(pair.start_prefill(request, key))
        await until(lambda: runner.num_steps_begun == 1)
        runner.allow(num_steps)
        await until(lambda: runner.num_steps_begun == min(3, 1 + num_steps))
        pair.gateway.cancel(stream)
        task.cancel()
        await asyncio.wait([task])
        pair.prefill.release([key])
        runner.run_freely()
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_steps", range(3))
async def test_cancelling_while_it_decodes_frees_it_at_the_next_step(num_steps: int) -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT, LONG)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        runner.allow(num_steps)
        await stream.has_tokens(1 + num_steps)
        pair.gateway.cancel(stream)
        runner.run_freely()
        await pair.assert_at_rest()


async def test_cancelling_at_once_frees_the_claim() -> None:
    async with counting_pair() as pair:
        stream = pair.gateway.open(*pair.request(PROMPT), pair.source)
        pair.gateway.cancel(stream)
        pair.gateway.session.cancel(stream.stream_id)  # again, and of what has ended: ignored
        await pair.assert_at_rest()


async def test_the_end_of_a_session_ends_everything_of_that_gateway_and_nothing_of_another() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        kept = pair.gateway.open(*pair.request(PROMPT, LONG), None)
        await until(lambda: runner.num_steps_begun == 1)  # while it waits, no claim overtakes it
        async with asyncio.TaskGroup() as group, pair.decode.session("gateway-2") as session:
            gateway = Gateway(session, group)
            request, key = pair.request(PROMPT, LONG)
            handed = gateway.open(request, key, pair.source)
            waits_for_prefill = gateway.open(*pair.request(PROMPT, LONG), pair.source)
            computed = gateway.open(*pair.request(PROMPT, LONG), None)
            await within(pair.start_prefill(request, key))
            await step_until(runner, lambda: bool(handed.token_ids and computed.token_ids))
            assert waits_for_prefill.granted is not None
            assert pair.decode.num_open == 4
            session.close()
            assert session.num_open == 0
            runner.run_freely()  # it is left when nothing of it can be written any more
        await within(kept.ended.wait())
        assert tuple(kept.token_ids) == expected_tokens(PROMPT, 40)
        await pair.assert_at_rest()


async def test_one_step_is_one_message() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        streams = []
        for start in range(4):
            request, key = pair.request(tuple(range(start * 50 + 1, start * 50 + 9)), LONG)
            streams.append(pair.gateway.open(request, key, pair.source))
            await within(pair.start_prefill(request, key))
        await step_until(runner, lambda: all(len(stream.token_ids) >= 2 for stream in streams))
        pair.gateway.message_sizes.clear()
        for _ in range(5):
            counts = [len(stream.token_ids) for stream in streams]
            runner.allow(1)
            for stream, count in zip(streams, counts, strict=True):
                await stream.has_tokens(count + 1)
        assert pair.gateway.message_sizes[-4:] == [4, 4, 4, 4]
        runner.run_freely()
        for stream in streams:
            await within(stream.ended.wait())


async def test_a_gateway_that_does_not_read_costs_one_event_for_each_sequence() -> None:
    async with counting_pair() as pair, pair.decode.session("slow") as session:
        opened = []
        for _ in range(2):
            request, key = pair.request(PROMPT, LONG)
            opened.append(
                OpenSequence(stream_id=len(opened), key=key, request=request, source=None, incarnation=DECODE)
            )
            session.open(opened[-1])
        await until(lambda: pair.decode_engine.stats().num_generation_tokens == 80)
        await until(lambda: pair.decode_engine.stats().num_running == 0)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        num_messages = 0
        while sum(map(len, tokens.values())) < 80:
            num_messages += 1
            events = await within(session.read())
            assert len(events) <= 4, "more events than sequences, but for their grants"
            for event in events:
                tokens[event.stream_id].extend(
                    getattr(event, "delta", None).token_ids if hasattr(event, "delta") else ()
                )
        assert num_messages <= 2
        assert tuple(tokens[0]) == tuple(tokens[1]) == expected_tokens(PROMPT, 40)


async def test_aborting_by_id_reaches_a_sequence_of_any_gateway_and_tells_it() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT, LONG)
        waiting, waiting_key = pair.request(PROMPT, LONG, request_id=request.request_id, choice_index=1)
        stream = pair.gateway.open(request, key, pair.source)
        not_prefilled = pair.gateway.open(waiting, waiting_key, pair.source)
        other = pair.gateway.open(*pair.request(PROMPT), None)
        await within(pair.start_prefill(request, key))
        await step_until(runner, lambda: bool(stream.token_ids and not_prefilled.granted))
        assert pair.decode.abort(request.request_id) == 2
        for each in (stream, not_prefilled):
            await within(each.ended.wait())
            assert isinstance(each.error, RequestCancelledError)
        runner.run_freely()
        await within(other.ended.wait())
        assert other.error is None
        await pair.assert_at_rest()


async def test_a_stream_id_in_use_is_the_gateways_fault() -> None:
    async with counting_pair() as pair:
        pair.decode_engine.runner.hold()
        stream = pair.gateway.open(*pair.request(PROMPT), None)
        request, key = pair.request(PROMPT)
        with pytest.raises(InvalidRequestError):
            pair.gateway.session.open(
                OpenSequence(stream_id=stream.stream_id, key=key, request=request, source=None, incarnation=DECODE)
            )


async def test_a_sequence_that_runs_already_is_refused_and_goes_on() -> None:
    async with counting_pair() as pair:
        pair.decode_engine.runner.hold()
        request, key = pair.request(PROMPT)
        first = pair.gateway.open(request, key, None)
        second = pair.gateway.open(request, key, None)
        await within(second.ended.wait())
        assert isinstance(second.error, ConflictError)
        pair.decode_engine.runner.run_freely()
        await within(first.ended.wait())
        assert tuple(first.token_ids) == expected_tokens(PROMPT, 8)


async def test_the_next_epoch_may_start_while_the_last_one_is_being_cleared() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, request_id="again")
        stream = pair.gateway.open(request, key, pair.source)
        await within(stream.answered.wait())
        pair.gateway.cancel(stream)
        request, key = pair.request(PROMPT, request_id="again", epoch=1)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        await pair.assert_at_rest()


async def test_a_deadline_that_passes_before_the_kv_came_ends_the_stream() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, deadline=Deadline.after(0.1))
        stream = pair.gateway.open(request, key, pair.source)
        await within(stream.ended.wait())
        assert isinstance(stream.error, (DeadlineExceededError, HandoffLostError))
        await pair.assert_at_rest()


async def test_choices_of_one_prompt_fetch_its_full_blocks_once() -> None:
    async with counting_pair() as pair:
        _, streams = await pair.generate(PROMPT, n=4)
        for stream in streams:
            assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        num_full_tokens = len(PROMPT) // 4 * 4
        tail_bytes = 4 * TOKEN_BYTES  # one block, of which three tokens are valid
        assert pair.client.stats.bytes_by_transport["tcp"] <= num_full_tokens * TOKEN_BYTES + 4 * tail_bytes
        await pair.assert_at_rest()


async def test_choices_do_not_depend_on_the_one_that_fetches_for_them() -> None:
    async with counting_pair() as pair:
        requests = [pair.request(PROMPT, request_id="siblings", choice_index=index) for index in range(3)]
        streams = [pair.gateway.open(request, key, pair.source) for request, key in requests]
        for stream in streams:
            await within(stream.answered.wait())
        pair.gateway.cancel(streams[0])
        await within(pair.start_prefill(requests[0][0], *(key for _, key in requests)))
        for stream in streams[1:]:
            await within(stream.ended.wait())
            assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        pair.prefill.release([requests[0][1]])
        await pair.assert_at_rest()


async def test_draining_refuses_new_sequences_and_lets_running_ones_finish() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        runner.hold()
        stream = pair.gateway.open(*pair.request(PROMPT), None)
        await within(stream.answered.wait())
        drain = pair.group.create_task(pair.decode.drain(20.0))
        await until(lambda: pair.decode.is_draining)
        refused = pair.gateway.open(*pair.request(PROMPT), None)
        await within(refused.ended.wait())
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.retry_after_s
        runner.run_freely()
        assert await within(drain)
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)


async def test_what_runs_at_the_end_of_a_drain_ends_with_an_error_and_not_silently() -> None:
    async with counting_pair() as pair:
        pair.decode_engine.runner.hold()
        stream = pair.gateway.open(*pair.request(PROMPT), None)
        await within(stream.answered.wait())
        assert not await within(pair.decode.drain(0.02))
        await within(stream.ended.wait())
        assert isinstance(stream.error, UnavailableError)
        assert stream.error.hop == "decode"


async def test_destinations_are_mirrored_while_they_last() -> None:
    async with counting_pair() as pair:
        pair.decode_engine.runner.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await stream.has_tokens(1)
        name = (request.request_id, key, HoldingKind.DESTINATION)
        assert pair.ownership.holdings[name] == (BlockGroup(first_block=0, num_blocks=NUM_BLOCKS),)
        pair.decode_engine.runner.run_freely()
        await within(stream.ended.wait())
        await pair.assert_at_rest()


async def test_a_hand_off_that_was_never_offered_is_refused_by_name() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        pair.prefill.release([key])
        unknown = HandoffKey(key.handoff_id, 0)
        stream = pair.gateway.open(request, unknown, pair.source)
        await within(stream.ended.wait())
        assert isinstance(stream.error, HandoffLostError)
        await pair.assert_at_rest()
