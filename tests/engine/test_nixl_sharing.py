"""Over NIXL a worker reads the cache of another as it is now; a peer that is gone ends its own reads and no others."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.fakes.nixl import needs_nixl
from weir.core.errors import ConfigError, UnavailableError
from weir.core.kv_layout import KvLayout
from weir.engine import nixl_sharing
from weir.engine.nixl_sharing import NixlSharing
from weir.engine.paged_kv_cache import PagedKvCache

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, kv_dtype="float16")
NUM_BLOCKS = 64
SIZE = LAYOUT.block_bytes


@contextmanager
def sharing(seed: int | None = None) -> Iterator[tuple[PagedKvCache, NixlSharing]]:
    """A cache, of zeros or random, and how others read it."""
    cache = PagedKvCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    if seed is not None:
        raw = cache.tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    opened = NixlSharing(cache)
    try:
        yield cache, opened
    finally:
        opened.close()


def over(read: Future[None]) -> None:
    read.result(timeout=60)


@needs_nixl
def test_each_read_brings_its_bytes_and_touches_no_others() -> None:
    with sharing(seed=1) as (source, theirs), sharing() as (sink, ours):
        memory = ours.map(theirs.export())
        assert memory.size_bytes == source.tensor.nbytes
        sizes = {block: 1 + 97 * block % SIZE for block in range(0, NUM_BLOCKS, 2)}
        reads = [
            memory.read((NUM_BLOCKS - 1 - block) * SIZE + 3, sink.block_bytes(block)[:size])
            for block, size in sizes.items()
            if size + 3 <= SIZE
        ]
        for read in reads:
            over(read)
        for block in range(NUM_BLOCKS):
            size = sizes.get(block, 0)
            expected = torch.zeros(SIZE, dtype=torch.uint8)
            if size and size + 3 <= SIZE:
                expected[:size] = source.block_bytes(NUM_BLOCKS - 1 - block)[3 : 3 + size]
            assert torch.equal(sink.block_bytes(block), expected), block


@needs_nixl
def test_a_read_sees_what_is_there_now() -> None:
    with sharing(seed=1) as (source, theirs), sharing() as (sink, ours):
        memory = ours.map(theirs.export())
        for value in (1, 2, 3):
            source.block_bytes(5).fill_(value)
            over(memory.read(5 * SIZE, sink.block_bytes(0)))
            assert sink.block_bytes(0).unique().tolist() == [value]


@needs_nixl
def test_a_peer_that_was_mapped_twice_stays_until_both_are_forgotten() -> None:
    with sharing(seed=1) as (source, theirs), sharing() as (sink, ours):
        first, second = ours.map(theirs.export()), ours.map(theirs.export())
        over(first.read(0, sink.block_bytes(0)))
        del first
        gc.collect()
        over(second.read(SIZE, sink.block_bytes(1)))
        assert torch.equal(sink.block_bytes(1), source.block_bytes(1))
        del second
        gc.collect()
        third = ours.map(theirs.export())
        over(third.read(2 * SIZE, sink.block_bytes(2)))
        assert torch.equal(sink.block_bytes(2), source.block_bytes(2))


@needs_nixl
def test_once_closed_it_maps_nothing_and_does_not_hang() -> None:
    with sharing(seed=1) as (cache, theirs):
        ours = NixlSharing(cache)
        memory = ours.map(theirs.export())
        ours.close()
        with pytest.raises(UnavailableError, match="closed"):
            ours.map(theirs.export())
        del memory
        gc.collect()


@needs_nixl
@pytest.mark.parametrize(
    "handle",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        json.dumps({"agent": 1}).encode(),
        json.dumps({"agent": "00", "memory_type": "DRAM", "device": 0, "address": 0, "size_bytes": 1}).encode(),
    ],
)
def test_a_handle_that_means_nothing_here_is_refused(handle: bytes) -> None:
    with sharing() as (_, ours), pytest.raises(UnavailableError):
        ours.map(handle)


@needs_nixl
@pytest.mark.parametrize("lie", [{"size_bytes": 1 << 40}, {"address": 4096}, {"memory_type": "NONE"}, {"device": 7}])
def test_a_handle_that_lies_costs_its_own_reads_alone(lie: dict[str, Any]) -> None:
    with sharing(seed=1) as (source, theirs), sharing() as (sink, ours), sharing(seed=2) as (_, other):
        good, bad = ours.map(other.export()), ours.map(json.dumps(json.loads(theirs.export()) | lie).encode())
        read = bad.read(bad.size_bytes - SIZE, sink.block_bytes(1))
        if "device" not in lie:  # there is but one memory of the host
            with pytest.raises(UnavailableError):
                over(read)
            assert bad.is_lost
        over(good.read(0, sink.block_bytes(0)))
        assert not good.is_lost
        assert source.tensor.nbytes == good.size_bytes


def serve(pipe: Connection) -> None:
    """Another process with a cache, until it is killed."""
    with sharing(seed=3) as (_, theirs):
        pipe.send(theirs.export())
        pipe.recv()


@needs_nixl
def test_a_peer_that_is_killed_ends_its_own_reads_alone() -> None:
    ours_end, theirs_end = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs_end,))
    process.start()
    try:
        with sharing() as (sink, ours), sharing(seed=1) as (source, other):
            memory, good = ours.map(ours_end.recv()), ours.map(other.export())
            over(memory.read(0, sink.block_bytes(0)))
            with sharing(seed=3) as (same, _):
                assert torch.equal(sink.block_bytes(0), same.block_bytes(0))
            process.kill()
            process.join()
            with pytest.raises(UnavailableError, match="cannot be read"):
                over(memory.read(0, sink.block_bytes(0)))
            assert memory.is_lost
            over(good.read(SIZE, sink.block_bytes(1)))
            assert torch.equal(sink.block_bytes(1), source.block_bytes(1))
    finally:
        process.kill()
        process.join()


def test_without_the_package_the_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_sharing, "_PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match="transfer_memory: 'nixl' needs the package nixl"):
        NixlSharing(PagedKvCache(LAYOUT, 1, torch.device("cpu")))
