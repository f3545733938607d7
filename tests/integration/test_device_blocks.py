"""KV that the host cannot see is handed off through slots, or out of the prefill worker's memory: the same tokens, no
step that waits, no block given back under a copy. The copies are a test's own, and so are the caches, which lie in host
memory and hide it, or in a file that the other side maps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.async_engine import CountingPair, counting_pair, expected_tokens
from tests.fakes.hidden_cache import FileSharing, HeldCopies
from tests.fakes.nixl import needs_nixl
from tests.fakes.worker_pair import GREEDY, until, within
from tests.integration.engines import real_pair
from tests.integration.test_same_tokens import LENGTHS, SHAPES, answers, check
from weir.core.errors import HandoffError, HandoffLostError, HopFailedError, UnavailableError, WeirError
from weir.core.request import RequestId

PROMPT = tuple(range(5, 40))  # 9 blocks of 4, in three steps of at most 16 tokens
OTHER_PROMPT = tuple(range(105, 140))
NUM_BLOCKS = 9
ONE_SLOT = 1
LONG = replace(GREEDY, max_tokens=40)


@asynccontextmanager
async def device_pair(
    *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[CountingPair, HeldCopies, HeldCopies]]:
    """Two workers whose blocks are hidden, and what copies for each."""
    source, sink = HeldCopies(), HeldCopies()
    async with counting_pair(
        prefill={"copies": source} | (prefill or {}), decode={"copies": sink} | (decode or {}), **options
    ) as pair:
        try:
            yield pair, source, sink
        finally:
            source.run_freely()
            sink.run_freely()


@pytest.mark.parametrize("staging_bytes", [ONE_SLOT, 64 << 10])
@pytest.mark.parametrize(("prefill_block", "decode_block"), [(4, 4), (4, 16), (16, 4), (1, 3)])
async def test_far_more_blocks_than_slots_arrive_for_any_block_sizes(
    prefill_block: int, decode_block: int, staging_bytes: int
) -> None:
    prompts = [tuple(range(start, start + 200)) for start in (3, 300, 600)]
    async with device_pair(
        prefill={"block_size": prefill_block, "num_blocks": 1024, "transfer_staging_bytes": staging_bytes},
        decode={"block_size": decode_block, "num_blocks": 1024, "transfer_staging_bytes": staging_bytes},
    ) as (pair, _, sink):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pair.generate(prompt)) for prompt in prompts]
        for prompt, task in zip(prompts, tasks, strict=True):
            _, (stream,) = task.result()
            assert tuple(stream.token_ids) == expected_tokens(prompt, 8)
        assert pair.decode_engine.stats().num_prompt_tokens == 0
        assert sink.num_ended >= 3 * (200 // max(prefill_block, decode_block))
        await pair.assert_at_rest()


@pytest.mark.parametrize(("is_source_hidden", "is_sink_hidden"), [(True, False), (False, True)])
async def test_a_worker_with_a_device_and_one_without_hand_off_to_each_other(
    is_source_hidden: bool, is_sink_hidden: bool
) -> None:
    def settings(is_hidden: bool) -> dict[str, Any]:
        return {"copies": HeldCopies()} if is_hidden else {}

    async with counting_pair(prefill=settings(is_source_hidden), decode=settings(is_sink_hidden)) as pair:
        _, streams = await pair.generate(PROMPT, n=3)
        for stream in streams:
            assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        await pair.assert_at_rest()


async def test_no_step_waits_for_a_copy_on_either_side() -> None:
    async with device_pair() as (pair, source, sink):
        source.hold()
        sink.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))  # computed and sampled, with every copy held
        await until(lambda: source.num_started > 0)
        other, other_key = pair.request(OTHER_PROMPT)
        result = await within(pair.start_prefill(other, other_key))
        assert result.first_tokens[0].token_id == expected_tokens(OTHER_PROMPT, 1)[0]
        source.run_freely()
        await until(lambda: sink.num_started > 0)
        computed_here = pair.gateway.open(*pair.request(OTHER_PROMPT, LONG), None)
        await within(computed_here.ended.wait())
        assert tuple(computed_here.token_ids) == expected_tokens(OTHER_PROMPT, 40)
        assert stream.token_ids == [], "it was activated before its KV was in place"
        sink.run_freely()
        await within(stream.ended.wait())
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        pair.prefill.release([other_key])
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_copies", [0, 1, 5, 8])
async def test_a_destination_is_not_reused_while_a_copy_to_it_is_under_way(num_copies: int) -> None:
    async with device_pair() as (pair, _, sink):
        sink.hold()
        sink.allow(num_copies)
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await until(lambda: sink.num_ended == num_copies and sink.num_started > num_copies)
        total_blocks = pair.decode_engine.stats().total_blocks
        pair.gateway.cancel(stream)
        await until(lambda: pair.prefill.num_held == 0)  # the prefill worker has heard of it
        computed_here = pair.gateway.open(*pair.request(OTHER_PROMPT, LONG), None)
        await within(computed_here.ended.wait())
        assert pair.decode_engine.stats().free_blocks <= total_blocks - NUM_BLOCKS
        sink.run_freely()
        await pair.assert_at_rest()


@pytest.mark.parametrize("is_aborted", [True, False], ids=["aborted by its id", "released"])
@pytest.mark.parametrize("num_copies", [0, 1, 5])
async def test_a_source_is_not_reused_while_it_is_being_copied(num_copies: int, is_aborted: bool) -> None:
    async with device_pair(prefill={"transfer_staging_bytes": ONE_SLOT}) as (pair, source, _):
        source.hold()
        source.allow(num_copies)
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await until(lambda: source.num_ended == num_copies and source.num_started > num_copies)
        if is_aborted:
            assert pair.prefill.abort(RequestId(request.request_id)) == 1
        else:
            assert pair.prefill.release([key]) == 1
        await within(stream.ended.wait())
        assert isinstance(stream.error, HandoffLostError)
        await until(lambda: pair.decode.num_open == 0)
        assert pair.prefill_engine.stats().held_blocks == NUM_BLOCKS
        assert pair.server.num_unreleased == 1
        source.run_freely()
        await pair.assert_at_rest()


async def test_a_prefill_worker_that_is_lost_while_blocks_are_copied_costs_no_block() -> None:
    async with device_pair() as (pair, _, sink):
        sink.hold()
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await until(lambda: sink.num_started > 0)
        await pair.server.__aexit__(None, None, None)
        sink.run_freely()
        await within(stream.ended.wait())
        assert stream.error is not None or tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        await until(lambda: pair.decode_engine.stats().free_blocks == pair.decode_engine.stats().total_blocks)


@pytest.mark.parametrize("fails_at", ["prefill", "decode"])
async def test_a_device_that_copies_no_more_ends_its_engine_and_no_wrong_token_goes_out(fails_at: str) -> None:
    async with device_pair() as (pair, source, sink):
        copies, engine = (source, pair.prefill_engine) if fails_at == "prefill" else (sink, pair.decode_engine)
        copies.failure = RuntimeError("the device is gone")
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        with suppress(WeirError):  # blocks are copied while later chunks are computed: the prefill may end with them
            await within(pair.start_prefill(request, key))
        await until(lambda: engine.stats().failure is not None)
        if fails_at == "prefill":  # its process ends then
            await pair.server.__aexit__(None, None, None)
        await within(stream.ended.wait())
        assert isinstance(stream.error, HopFailedError)
        assert stream.token_ids == []


@pytest.mark.parametrize(("prefill_block", "decode_block", "chunk"), SHAPES)
async def test_a_model_gives_the_tokens_of_one_engine_hot_and_cold(
    tiny_model_dir: Path, prefill_block: int, decode_block: int, chunk: int
) -> None:
    expected = await answers(tiny_model_dir)
    async with real_pair(
        tiny_model_dir,
        prefill={"block_size": prefill_block, "max_num_batched_tokens": chunk, "copies": HeldCopies()},
        decode={"block_size": decode_block, "copies": HeldCopies(), "transfer_staging_bytes": 128 << 10},
    ) as pair:
        await check(pair, expected)
        await pair.assert_at_rest()
        await check(pair, expected)  # now both prefix caches are hot
        await pair.assert_at_rest()


async def test_a_model_gives_the_same_tokens_after_streams_were_ended_in_the_middle(tiny_model_dir: Path) -> None:
    expected = await answers(tiny_model_dir)
    source, sink = HeldCopies(), HeldCopies()
    async with real_pair(
        tiny_model_dir,
        prefill={"copies": source, "enable_prefix_caching": False, "transfer_staging_bytes": ONE_SLOT},
        decode={"copies": sink, "enable_prefix_caching": False, "num_blocks": 64},
    ) as pair:
        for copies, num_copies in ((source, 3), (sink, 2), (source, 0), (sink, 0)):
            num_started = copies.num_started
            copies.hold()
            copies.allow(num_copies)
            request, key = pair.request(tuple(range(3, 303)))
            stream = pair.gateway.open(request, key, pair.source)
            await within(pair.start_prefill(request, key))
            await until(lambda: copies.num_started > num_started + num_copies)  # noqa: B023
            pair.gateway.cancel(stream)
            copies.run_freely()
            await check(pair, {length: expected[length] for length in LENGTHS[-3:]})
            await pair.assert_at_rest()


@asynccontextmanager
async def sharing_pair(
    folder: Path, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[CountingPair, HeldCopies, FileSharing]]:
    """Two workers that map each other's caches; what copies for decode, and what maps there."""
    sink, sharing = HeldCopies(), FileSharing(folder / "decode")
    async with counting_pair(
        prefill={"copies": HeldCopies(), "sharing": FileSharing(folder / "prefill")} | (prefill or {}),
        decode={"copies": sink, "sharing": sharing} | (decode or {}),
        **options,
    ) as pair:
        try:
            yield pair, sink, sharing
        finally:
            sink.run_freely()


async def test_a_worker_of_the_same_host_copies_out_of_the_memory_it_has_mapped(tmp_path: Path) -> None:
    async with sharing_pair(tmp_path) as (pair, _, sharing):
        for prompt in (PROMPT, OTHER_PROMPT, PROMPT):
            _, streams = await pair.generate(prompt, n=2)
            for stream in streams:
                assert tuple(stream.token_ids) == expected_tokens(prompt, 8)
        await pair.assert_at_rest()
        assert sharing.num_mapped == 1
        assert pair.client.stats.bytes_by_transport["tcp"] == pair.server.stats.bytes_by_transport["tcp"] == 0
        assert pair.client.stats.bytes_by_transport["memory"] >= 2 * len(PROMPT) * 16


@pytest.mark.parametrize("why", ["block size", "mapping fails", "decode shares none", "prefill shares none"])
async def test_frames_carry_the_blocks_where_memory_cannot_be_shared(tmp_path: Path, why: str) -> None:
    prefill = {"sharing": None} if why == "prefill shares none" else {}
    decode: dict[str, Any] = {"sharing": None} if why == "decode shares none" else {}
    if why == "block size":
        decode["block_size"] = 8
    async with sharing_pair(tmp_path, prefill=prefill, decode=decode) as (pair, _, sharing):
        if why == "mapping fails":
            sharing.failure = UnavailableError("the GPU is not visible")
        _, (stream,) = await pair.generate(PROMPT)
        assert tuple(stream.token_ids) == expected_tokens(PROMPT, 8)
        assert pair.client.stats.bytes_by_transport["tcp"] >= len(PROMPT) * 16
        assert pair.client.stats.bytes_by_transport["memory"] == 0
        await pair.assert_at_rest()


@pytest.mark.parametrize("num_copies", [0, 1, 5, 8])
async def test_blocks_that_were_given_back_while_they_were_copied_give_no_token(
    tmp_path: Path, num_copies: int
) -> None:
    async with sharing_pair(tmp_path) as (pair, sink, _):
        sink.hold()
        sink.allow(num_copies)
        request, key = pair.request(PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        await within(pair.start_prefill(request, key))
        await until(lambda: sink.num_ended == num_copies and sink.num_started > num_copies)
        assert pair.prefill.release([key]) == 1
        await until(lambda: pair.prefill_engine.stats().num_holds == 0)
        other, other_key = pair.request(OTHER_PROMPT)
        await within(pair.start_prefill(other, other_key))  # maybe into the same blocks
        sink.run_freely()
        await within(stream.ended.wait())
        assert isinstance(stream.error, HandoffLostError)
        assert stream.token_ids == []
        pair.prefill.release([other_key])
        await pair.assert_at_rest()


async def test_frames_carry_the_blocks_after_memory_could_not_be_read(tmp_path: Path) -> None:
    async with sharing_pair(tmp_path) as (pair, _, sharing):
        await pair.generate(PROMPT)
        sharing.failure = UnavailableError("the peer's memory is out of reach")
        request, key = pair.request(OTHER_PROMPT)
        stream = pair.gateway.open(request, key, pair.source)
        with suppress(WeirError):  # blocks are read while later chunks are computed: the prefill may end with them
            await within(pair.start_prefill(request, key))
        await within(stream.ended.wait())
        assert isinstance(stream.error, HandoffError)
        assert stream.token_ids == []
        _, (stream,) = await pair.generate(OTHER_PROMPT)
        assert tuple(stream.token_ids) == expected_tokens(OTHER_PROMPT, 8)
        assert pair.client.stats.bytes_by_transport["tcp"] >= len(OTHER_PROMPT) * 16
        await pair.assert_at_rest()


@needs_nixl
async def test_a_model_gives_the_tokens_of_one_engine_over_nixl(tiny_model_dir: Path) -> None:
    expected = await answers(tiny_model_dir)
    nixl = {"transfer_memory": "nixl"}
    async with real_pair(
        tiny_model_dir, prefill=nixl | {"copies": HeldCopies()}, decode=nixl | {"copies": HeldCopies()}
    ) as pair:
        await check(pair, expected)
        await check(pair, expected)
        assert pair.client.stats.bytes_by_transport["tcp"] == 0
        assert pair.client.stats.bytes_by_transport["memory"] > 0
        await pair.assert_at_rest()


async def test_a_model_gives_the_tokens_of_one_engine_out_of_mapped_memory(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    expected = await answers(tiny_model_dir, kernel_cache_dir=None)
    async with real_pair(
        tiny_model_dir,
        prefill={"copies": HeldCopies(), "sharing": FileSharing(tmp_path / "prefill")},
        decode={"copies": HeldCopies(), "sharing": FileSharing(tmp_path / "decode")},
        listen=f"unix://{tmp_path / 'kv.sock'}",
    ) as pair:
        await check(pair, expected)
        await check(pair, expected)
        assert pair.client.stats.bytes_by_transport["unix"] == 0
        assert pair.client.stats.bytes_by_transport["memory"] > 0
        await pair.assert_at_rest()
