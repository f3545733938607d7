"""Blocks that the host cannot see are read and written through slots, each used by one piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from tests.fakes.hidden_cache import HeldCopies, hide_from_host
from tests.fakes.worker_pair import until, within
from weir.core.kv_layout import KvLayout
from weir.engine.block_access import BlockAccess, InPlaceBlocks
from weir.engine.block_copies import BlockCopies
from weir.engine.block_staging import NUM_THREADS, StagedBlocks, StagedRead
from weir.engine.paged_kv_cache import PagedKvCache

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_size=4, kv_dtype="float32")
SIZE = LAYOUT.block_bytes
NUM_BLOCKS = 12


def make_cache(layout: KvLayout = LAYOUT) -> PagedKvCache:
    """Every byte of it is its own."""
    cache = PagedKvCache(layout, NUM_BLOCKS, torch.device("cpu"))
    raw = cache.tensor.view(torch.uint8).view(-1)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
    return cache


class Bench:
    """A hidden cache, and what was in it at the start."""

    def __init__(self, staged: StagedBlocks, cache: PagedKvCache, copies: HeldCopies) -> None:
        self.staged = staged
        self.cache = cache
        self.copies = copies
        self.before = [bytes(cache.block_bytes(index).numpy()) for index in range(NUM_BLOCKS)]
        self.failures: list[BaseException] = []
        self.num_ended = 0

    def ended(self) -> None:
        self.num_ended += 1

    def read(self, block_id: int) -> StagedRead:
        return self.staged.read(block_id, 0, SIZE, self.ended)

    def block(self, block_id: int) -> bytes:
        return bytes(self.cache.block_bytes(block_id).numpy())


@asynccontextmanager
async def bench(num_slots: int = 2) -> AsyncIterator[Bench]:
    cache, copies = hide_from_host(make_cache()), HeldCopies()
    staged = StagedBlocks(
        cache, copies, size_bytes=num_slots * SIZE, on_failure=lambda error: made.failures.append(error)
    )
    made = Bench(staged, cache, copies)
    async with staged:
        try:
            yield made
        finally:
            copies.run_freely()


async def test_a_read_gives_the_bytes_of_its_piece_when_the_copy_is_over() -> None:
    async with bench() as made:
        made.copies.hold()
        read = made.staged.read(3, 7, 20, made.ended)
        await until(lambda: made.copies.num_started == 1)
        assert (read.payload, made.num_ended) == (None, 0)
        made.copies.allow()
        await until(lambda: made.num_ended == 1)
        assert read.payload == made.before[3][7:27]
        assert read.payload is not None
        assert read.payload.readonly
        made.cache.tensor.zero_()  # the block is somebody else's; the payload is its own
        assert read.payload == made.before[3][7:27]
        read.release()
        assert made.staged.num_free_slots == 2


async def test_reads_wait_in_line_for_a_slot_and_far_more_than_there_are_flow_through() -> None:
    async with bench(num_slots=1) as made:
        reads = [made.read(index % NUM_BLOCKS) for index in range(50)]
        for index, read in enumerate(reads):
            await until(lambda index=index: made.num_ended == index + 1)  # type: ignore[misc]
            assert read.payload == made.before[index % NUM_BLOCKS]
            assert all(later.payload is None for later in reads[index + 1 :])
            assert made.copies.num_started == index + 1, "a slot was given away before it was free"
            read.release()
        assert made.staged.num_free_slots == 1


async def test_a_read_that_is_not_wanted_any_more_leaves_the_line_at_once_and_is_never_copied() -> None:
    async with bench(num_slots=1) as made:
        first, second, third = made.read(0), made.read(1), made.read(2)
        second.release()
        assert made.num_ended == 1
        await until(lambda: made.num_ended == 2)
        first.release()
        await until(lambda: made.num_ended == 3)
        assert third.payload == made.before[2]
        assert made.copies.num_started == 2
        third.release()


async def test_a_read_that_is_released_while_it_is_copied_ends_only_with_its_copy() -> None:
    async with bench(num_slots=1) as made:
        made.copies.hold()
        read, waiting = made.read(0), made.read(1)
        await until(lambda: made.copies.num_started == 1)
        read.release()
        assert made.num_ended == 0, "the block was given back under its reader"
        assert made.copies.num_started == 1, "the slot was given away under its writer"
        made.copies.run_freely()
        await until(lambda: made.num_ended == 2)
        assert read.payload is None
        assert waiting.payload == made.before[1]
        waiting.release()
        assert made.staged.num_free_slots == 1


@pytest.mark.parametrize("num_taken", [0, 2], ids=["in a slot", "without a slot"])
async def test_a_write_changes_its_piece_of_the_block_when_it_is_placed_and_nothing_else(num_taken: int) -> None:
    async with bench() as made:
        taken = [made.staged.write(0, 0, SIZE) for _ in range(num_taken)]
        write = made.staged.write(5, 8, 16)
        assert made.staged.num_free_slots == 2 - max(1, num_taken)
        write.memory[:] = b"sixteen bytes ok"
        made.copies.hold()
        write.place(made.ended)
        await until(lambda: made.copies.num_started == 1)
        assert (made.num_ended, made.block(5)) == (0, made.before[5])
        made.copies.run_freely()
        await until(lambda: made.num_ended == 1)
        assert made.block(5) == made.before[5][:8] + b"sixteen bytes ok" + made.before[5][24:]
        for other in taken:
            other.discard()
        assert made.staged.num_free_slots == 2
        assert [made.block(index) for index in (4, 6)] == [made.before[4], made.before[6]]


async def test_a_write_that_is_discarded_leaves_the_block_as_it_was() -> None:
    async with bench() as made:
        write = made.staged.write(5, 0, SIZE)
        write.memory[:] = bytes(SIZE)
        write.discard()
        assert made.staged.num_free_slots == 2
        assert (made.block(5), made.copies.num_started) == (made.before[5], 0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("source_block_size", [1, 3, 4, 8])
async def test_tokens_of_another_block_size_are_written_as_into_host_memory(
    kv_dtype: str, source_block_size: int
) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, block_size=4, kv_dtype=kv_dtype)
    cache, hidden = make_cache(layout), hide_from_host(make_cache(layout))
    source = bytearray(torch.arange(layout.token_bytes * source_block_size).to(torch.uint8).numpy().tobytes())
    table = (7, 2, 9, 0)
    async with StagedBlocks(hidden, BlockCopies(torch.device("cpu")), size_bytes=1, on_failure=print) as staged:
        accesses: list[BlockAccess] = [InPlaceBlocks(cache), staged]
        for access in accesses:
            first_token = source_block_size  # the second block there, but for its first token if it has more
            num_tokens = source_block_size - (source_block_size > 1)
            written = asyncio.Event()
            access.write_tokens(
                table,
                first_token + source_block_size - num_tokens,
                num_tokens,
                memoryview(source),
                source_block_size,
                written.set,
            )
            await within(written.wait())
    assert torch.equal(cache.tensor.view(torch.uint8), hidden.tensor.view(torch.uint8))
    assert not torch.equal(cache.tensor.view(torch.uint8), make_cache(layout).tensor.view(torch.uint8))


async def test_a_copy_that_fails_is_told_before_it_is_over_and_gives_no_bytes() -> None:
    async with bench() as made:
        made.copies.failure = RuntimeError("the device is gone")
        heard: list[int] = []
        read = made.staged.read(0, 0, SIZE, lambda: heard.append(len(made.failures)))
        write = made.staged.write(1, 0, SIZE)
        await until(lambda: len(heard) == 1)
        write.place(lambda: heard.append(len(made.failures)))
        await until(lambda: len(heard) == 2)
        assert heard == [1, 2]
        assert read.payload is None
        read.release()
        assert made.staged.num_free_slots == 2
        assert made.block(1) == made.before[1]


async def test_the_loop_goes_on_while_every_thread_waits_for_a_copy() -> None:
    async with bench(num_slots=NUM_THREADS + 2) as made:
        made.copies.hold()
        reads = [made.read(index) for index in range(NUM_THREADS + 2)]
        await until(lambda: made.copies.num_started == NUM_THREADS)
        async with asyncio.timeout(1.0):
            for _ in range(100):
                await asyncio.sleep(0)
        made.copies.run_freely()
        await until(lambda: made.num_ended == NUM_THREADS + 2)
        for read in reads:
            read.release()


@pytest.mark.gpu
async def test_pieces_go_from_one_device_to_another_and_come_out_the_same() -> None:
    layout = KvLayout(num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, kv_dtype="bfloat16")
    device = torch.device("cuda")
    caches = [PagedKvCache(layout, 64, device) for _ in range(2)]
    caches[0].tensor.normal_()
    torch.cuda.synchronize()
    copies = [BlockCopies(device) for _ in caches]
    ended: list[int] = []
    failures: list[BaseException] = []
    async with (
        StagedBlocks(caches[0], copies[0], size_bytes=4 << 20, on_failure=failures.append) as source,
        StagedBlocks(caches[1], copies[1], size_bytes=4 << 20, on_failure=failures.append) as sink,
    ):
        size = source.piece_bytes
        for block_id in range(64):
            for offset in range(0, layout.block_bytes, size):
                num_ended = len(ended)
                read = source.read(block_id, offset, size, lambda: ended.append(0))
                await until(lambda: len(ended) > num_ended)  # noqa: B023
                write = sink.write(63 - block_id, offset, size)
                assert read.payload is not None
                write.memory[:] = read.payload
                read.release()
                write.place(lambda: ended.append(1))
                await until(lambda: len(ended) > num_ended + 1)  # noqa: B023
    assert failures == []
    assert torch.equal(caches[1].tensor, caches[0].tensor.flip(0))
