"""ColdBlocks: whatever is late, a load brings exactly what was saved, and touches nothing else."""

from __future__ import annotations

import random
import tempfile
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.late_copies import LateCopies, LateDevice, LateExecutor
from tests.fakes.model_runner import make_config
from weir.core.block_hash import BlockHash
from weir.core.errors import ConfigError
from weir.core.kv_layout import KvLayout
from weir.engine.block_copies import BlockCopies
from weir.engine.cold_blocks import MIN_LOADED_TOKENS, ColdBlocks, open_cold_blocks
from weir.engine.disk_blocks import DiskBlocks
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.prefix_load import PrefixLoad

NUM_BLOCKS = 9
CHAINS = [[BlockHash(bytes([chain, index]) * 8) for index in range(4)] for chain in range(6)]
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, kv_dtype="float32")


def bytes_of(block_hash: BlockHash) -> torch.Tensor:
    """What the block of this hash holds, [block_bytes]."""
    return torch.tensor(list(blake2b(block_hash, digest_size=LAYOUT.block_bytes).digest()), dtype=torch.uint8)


class Pool:
    """A pool that is a list of slabs: what steps do to it, at random, and what each slab must hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = PagedKvCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
        self.slabs = self.cache.tensor.view(NUM_BLOCKS, -1).view(torch.uint8)
        self.content: dict[int, BlockHash] = {}
        self.loads: list[PrefixLoad] = []
        self.dropped: set[BlockHash] = set()
        self.saved: set[BlockHash] = set()
        self.device, self.jobs = LateDevice(), LateExecutor()
        self.outward, self.inward = LateCopies(self.device), LateCopies(self.device)
        self.cold = ColdBlocks(
            self.cache,
            self.outward,
            self.inward,
            num_host_slots=self.random.choice([1, 4, 7]),
            num_disk_slots=self.random.choice([0, 4, 24]),
            disk_directory=Path(tempfile.gettempdir()),
            executor=self.jobs,
            min_loaded_tokens=1,
        )
        self.cold.on_drop = self.dropped.add

    def take(self, count: int) -> list[int]:
        """Blocks that no load writes; what they held is saved."""
        busy = {block_id for load in self.loads for block_id in load.block_ids}
        taken = [block_id for block_id in self.random.sample(range(NUM_BLOCKS), NUM_BLOCKS) if block_id not in busy]
        del taken[count:]
        old = {block_id: self.content.pop(block_id) for block_id in taken if block_id in self.content}
        self.cold.save(list(old.items()))
        kept = {name for name in old.values() if name in self.cold}  # where every slot is lent nothing is
        self.saved |= kept
        self.dropped -= kept
        return taken

    def compute(self) -> None:
        """A step writes blocks that are in nobody's cache."""
        chain = self.random.choice(CHAINS)
        hashes = [name for name in chain if name not in self.content.values()][: self.random.randint(1, 4)]
        blocks = self.take(len(hashes))
        self.device.begin_step()
        for block_id, block_hash in zip(blocks, hashes, strict=False):
            self.slabs[block_id] = bytes_of(block_hash)
            self.content[block_id] = block_hash

    def load(self) -> None:
        wanted = self.random.choice(CHAINS)[self.random.randint(0, 2) :]
        wanted = [name for name in wanted if name not in self.content.values()]
        coming = {name for load in self.loads for name in load.block_hashes}
        run = wanted[: self.cold.find_run(wanted)]
        if run and not coming & set(run):
            self.cold.touch(run)
            blocks = self.take(len(run))
            if blocks:
                self.loads.append(self.cold.start_load(run[: len(blocks)], blocks))

    def advance(self) -> None:
        self.cold.poll()
        for load in list(self.loads):
            self.cold.advance(load)
            if load.is_done:
                self.cold.finish(load)
                self.loads.remove(load)
                for block_id, block_hash in zip(load.block_ids, load.block_hashes, strict=True):
                    if block_hash not in self.content.values():
                        self.content[block_id] = block_hash

    def give_up(self) -> None:
        if self.loads and self.random.random() < 0.3:
            self.cold.give_up(self.loads.pop(self.random.randrange(len(self.loads))))

    def move(self) -> None:
        self.random.choice([self.outward, self.inward, self.jobs, self.jobs]).do(self.random.randint(1, 3))

    def forget_all(self) -> None:
        if not self.loads and self.random.random() < 0.03:
            self.cold.forget_all()
            self.saved.clear()
            self.content.clear()

    def check(self) -> None:
        self.cold.check_integrity()
        for block_id, block_hash in self.content.items():
            assert torch.equal(self.slabs[block_id], bytes_of(block_hash)), f"block {block_id} holds something else"
        assert self.cold.content() == self.saved - self.dropped, "content came or went and nobody was told"


def live(pool: Pool, num_moves: int) -> None:
    loads, moves = [pool.load] * 3, [pool.move] * 4
    choices = [pool.compute, *loads, pool.advance, pool.advance, pool.give_up, *moves, pool.forget_all]
    for _ in range(num_moves):
        pool.random.choice(choices)()
        pool.check()


@given(seed=st.integers(0, 2**32))
def test_loads_bring_what_was_saved_and_touch_nothing_else(seed: int) -> None:
    live(Pool(seed), 300)


def test_random_lives_load_from_both_tiers() -> None:
    pools = [Pool(seed) for seed in range(20)]
    for pool in pools:
        live(pool, 300)
    assert sum(pool.cold.host_stats().num_hit_tokens for pool in pools) > 20 * LAYOUT.block_size
    assert sum(pool.cold.disk_stats().num_hit_tokens for pool in pools) > 20 * LAYOUT.block_size


def make_disk(directory: Path, num_slots: int = 4) -> tuple[DiskBlocks, list[BlockHash]]:
    dropped: list[BlockHash] = []
    return DiskBlocks(directory, num_slots, LAYOUT.block_bytes, on_drop=dropped.append), dropped


def test_disk_gives_back_what_it_was_given(tmp_path: Path) -> None:
    disk, dropped = make_disk(tmp_path)
    names = [*CHAINS[0], CHAINS[1][0]]
    for name in names:
        assert disk.write(name, memoryview(bytearray(bytes_of(name).tolist())), after=None).result()
    assert dropped == names[:1], "the least recently used one made room"
    found = bytearray(LAYOUT.block_bytes)
    assert disk.read(names[3], memoryview(found), after=None).result()
    assert list(found) == bytes_of(names[3]).tolist()
    assert list(tmp_path.iterdir()) == [], "the file has no name"


def test_disk_notices_a_changed_byte(tmp_path: Path) -> None:
    disk, _ = make_disk(tmp_path)
    name = CHAINS[0][0]
    disk.write(name, memoryview(bytearray(LAYOUT.block_bytes)), after=None).result()
    disk._file.seek(disk._entries[name].slot * LAYOUT.block_bytes + 5)
    disk._file.write(b"\1")
    assert not disk.read(name, memoryview(bytearray(LAYOUT.block_bytes)), after=None).result()


def test_tiers_that_cannot_be_had_are_refused_by_name(tmp_path: Path) -> None:
    cache = PagedKvCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    needed = MIN_LOADED_TOKENS * LAYOUT.token_bytes
    for settings, field in (
        ({"host_kv_cache_bytes": needed - 1}, "host_kv_cache_bytes"),
        ({"host_kv_cache_bytes": 1 << 60}, "host_kv_cache_bytes"),
        (
            {"host_kv_cache_bytes": needed, "disk_kv_cache_bytes": 5, "disk_kv_cache_dir": tmp_path},
            "disk_kv_cache_bytes",
        ),
        (
            {"host_kv_cache_bytes": needed, "disk_kv_cache_bytes": 1 << 60, "disk_kv_cache_dir": tmp_path},
            "disk_kv_cache_bytes",
        ),
        (
            {"host_kv_cache_bytes": needed, "disk_kv_cache_bytes": needed, "disk_kv_cache_dir": tmp_path / "none"},
            "disk_kv_cache_dir",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            open_cold_blocks(make_config(**settings), cache)
        assert caught.value.param == field
    assert open_cold_blocks(make_config(), cache) is None
    assert open_cold_blocks(make_config(host_kv_cache_bytes=needed), cache) is not None


@pytest.mark.gpu
def test_blocks_of_a_device_survive_in_pinned_memory() -> None:
    device = torch.device("cuda")
    cache = PagedKvCache(LAYOUT, NUM_BLOCKS, device)
    slabs = cache.tensor.view(NUM_BLOCKS, -1).view(torch.uint8)
    cold = ColdBlocks(cache, BlockCopies(device), BlockCopies(device), num_host_slots=6, min_loaded_tokens=1)
    for block_id, name in enumerate(CHAINS[0]):
        slabs[block_id] = bytes_of(name).to(device)
    cold.save(list(enumerate(CHAINS[0])))
    slabs.fill_(7)
    load = cold.start_load(CHAINS[0], [8, 7, 6, 5])
    assert load.copy is not None
    load.copy.wait()
    assert load.is_done
    for block_id, name in zip(load.block_ids, CHAINS[0], strict=True):
        assert torch.equal(slabs[block_id].cpu(), bytes_of(name))
