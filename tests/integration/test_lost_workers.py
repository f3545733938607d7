"""One side of a hand-off is gone, at each of its moments: the other ends in bounded time and keeps no block."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.async_engine import CountingPair, counting_pair, expected_tokens
from tests.fakes.worker_pair import GREEDY, Gateway, until, within
from weir.core.errors import HandoffLostError, HopFailedError, RequestCancelledError, WorkerLostError

PROMPT = tuple(range(5, 40))  # three steps of at most 16 tokens
LONG = replace(GREEDY, max_tokens=60)


async def lose_prefill(pair: CountingPair) -> None:
    """As if its process had died: every connection breaks and nobody listens any more."""
    await pair.server.__aexit__(None, None, None)


async def assert_decode_at_rest(pair: CountingPair) -> None:
    stats = pair.decode_engine.stats
    await until(lambda: stats().free_blocks == stats().total_blocks and stats().num_importing == 0)
    await pair.decode_engine.check_integrity()


@pytest.mark.parametrize("num_steps", range(3))
async def test_prefill_lost_before_the_seal_ends_the_stream_with_its_hop(num_steps: int) -> None:
    async with counting_pair() as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)

        async def prefill() -> None:
            with pytest.raises(RequestCancelledError):
                await pair.start_prefill(request, key)

        pair.group.create_task(prefill())
        await until(lambda: runner.num_steps_begun == 1)
        runner.allow(num_steps)
        await until(lambda: runner.num_steps_begun == 1 + num_steps)
        await lose_prefill(pair)
        await within(stream.ended.wait())
        assert isinstance(stream.error, HopFailedError)
        assert stream.error.hop == "transfer"
        runner.run_freely()
        await assert_decode_at_rest(pair)


async def test_prefill_lost_between_seal_and_commit_ends_the_stream_and_frees_the_destination() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        busy = pair.gateway.open(*pair.request((1, 2, 3), LONG), None)
        await within(busy.answered.wait())
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(stream.answered.wait())
        runner.hold()  # a step under way: no destination is allocated until it ends
        num_steps = runner.num_steps_begun
        await until(lambda: runner.num_steps_begun > num_steps or busy.ended.is_set())
        await within(pair.start_prefill(request, key))
        await lose_prefill(pair)
        runner.run_freely()
        await within(stream.ended.wait())
        assert isinstance(stream.error, (WorkerLostError, HandoffLostError)) or tuple(
            stream.token_ids
        ) == expected_tokens(PROMPT, 8), "neither an error nor the right tokens"
        await within(busy.ended.wait())
        await assert_decode_at_rest(pair)


async def test_prefill_lost_after_the_commit_is_not_noticed() -> None:
    async with counting_pair() as pair:
        runner = pair.decode_engine.runner
        request, key = pair.request(PROMPT, LONG)
        runner.hold()
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await stream.has_tokens(1)
        await lose_prefill(pair)
        runner.run_freely()
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 60)
        await assert_decode_at_rest(pair)


async def test_a_decode_worker_that_never_fetches_costs_a_lease() -> None:
    async with counting_pair(lease_s=0.3) as pair:
        request, key = pair.request(PROMPT)
        await within(pair.start_prefill(request, key))
        assert pair.prefill.num_held == 1
        await pair.assert_at_rest()
        assert pair.server.stats.leases_expired_total == 1


async def test_a_decode_worker_that_is_lost_while_it_fetches_costs_a_lease() -> None:
    async with counting_pair(lease_s=0.3) as pair:
        runner = pair.prefill_engine.runner
        runner.hold()
        request, key = pair.request(PROMPT)
        async with asyncio.TaskGroup() as group, pair.decode.session("gateway-2") as session:
            gateway = Gateway(session, group)
            gateway.open(request, key, pair.source)
            prefill = group.create_task(pair.start_prefill(request, key))
            await until(lambda: pair.client.num_in_flight == 1 and runner.num_steps_begun == 1)
            runner.allow(1)
            await until(lambda: runner.num_steps_begun == 2)
            await pair.client.__aexit__(None, None, None)
            session.close()
            runner.run_freely()
            await within(prefill)
        await pair.assert_at_rest()


async def test_a_gateway_that_goes_away_frees_decode_at_once_and_prefill_by_the_abort() -> None:
    async with counting_pair() as pair:
        request, key = pair.request(PROMPT, LONG)
        async with asyncio.TaskGroup() as group, pair.decode.session("gateway-2") as session:
            gateway = Gateway(session, group)
            gateway.open(request, key, pair.source)
            await until(lambda: pair.client.num_in_flight == 1)
            await within(pair.start_prefill(request, key))
            session.close()
        await assert_decode_at_rest(pair)
        await pair.assert_at_rest()
