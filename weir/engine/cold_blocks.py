"""What the pool had to give up, by content: in host memory and, from there, on disk. It comes back asynchronously.

One mechanism serves cold prefixes and preempted sequences, since the full blocks of both are published: a block that is
about to be overwritten is copied to host memory first, and a sequence that is admitted gets back what follows its
prefix in the pool. No step waits for a load or a disk.

Saves and loads have a stream each, so that a step, which on the device does wait for the saves of what it overwrites,
never waits for a load before them. Whatever is launched after a save comes after it, loads and other saves too. The
disk's thread is outside that order: a slot is lent to it, and it waits for the slot's last copy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from weir.core.block_hash import BlockHash
from weir.core.deadline import Clock
from weir.core.errors import ConfigError
from weir.engine.block_copies import BlockCopies, BlockCopy
from weir.engine.config import EngineConfig
from weir.engine.disk_blocks import DiskBlocks
from weir.engine.host_blocks import HostBlocks
from weir.engine.host_memory import available_bytes
from weir.engine.paged_kv_cache import PagedKvCache
from weir.engine.prefix_load import PrefixLoad
from weir.engine.stats import TierStats

MIN_LOADED_TOKENS = 64
"""A shorter run is computed again: a load may cost the wait for one step, in which a GPU computes about as many tokens.
So only blocks of sequences at least as long are saved."""

LOAD_POLL_S = 0.001
"""How often to look after loads while nothing can be computed."""

MAX_READ_AHEAD = 32
"""Blocks of one load that are asked of the disk before the first of them has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiskMove:
    """A block between the disk and a slot that is lent for it. The future says whether it went well."""

    block_hash: BlockHash
    slot: int
    is_right: Future[bool]


class ColdBlocks:
    """Two tiers under one pool of blocks. Used by the engine's thread only.

    Args:
        cache: the pool's memory.
        saves, loads: what copies from the pool, and into it.
        num_host_slots, num_disk_slots: blocks of each tier; the second may be 0.
        disk_directory, executor: see `DiskBlocks`.
        min_loaded_tokens: shorter runs are computed again.

    Attributes:
        on_drop: told of content that neither tier has any more.
        token_s: seconds that computing one token takes at best.

    Raises:
        ConfigError: host memory or the file cannot be had.
    """

    def __init__(
        self,
        cache: PagedKvCache,
        saves: BlockCopies,
        loads: BlockCopies,
        *,
        num_host_slots: int,
        num_disk_slots: int = 0,
        disk_directory: Path | None = None,
        executor: Executor | None = None,
        min_loaded_tokens: int = MIN_LOADED_TOKENS,
        clock: Clock = time.monotonic,
    ) -> None:
        self.on_drop: Callable[[BlockHash], None] = lambda block_hash: None
        self.token_s: Callable[[], float] = lambda: math.inf
        self._block_size = cache.layout.block_size
        self._slabs = cache.tensor.view(cache.num_blocks, -1).view(torch.uint8)
        self._saves = saves
        self._loads = loads
        self._min_loaded_tokens = min_loaded_tokens
        self._clock = clock
        block_bytes = cache.layout.block_bytes
        self._host = HostBlocks(num_host_slots, block_bytes, cache.tensor.device, on_drop=self._note_dropped)
        self._disk: DiskBlocks | None = None
        if num_disk_slots:
            assert disk_directory is not None
            self._disk = DiskBlocks(
                disk_directory, num_disk_slots, block_bytes, on_drop=self._note_dropped, executor=executor
            )
        # So much of host memory is on disk too, before it is needed: one admission may take many slots, for what it
        # evicts and for what it reads.
        self._num_spare = max(1, num_host_slots // 2)
        self._last_copy: dict[int, BlockCopy] = {}
        self._departing: deque[_DiskMove] = deque()
        self._arriving: dict[BlockHash, _DiskMove] = {}
        self._num_saved = self._num_written = 0
        self._num_loaded = self._num_read = 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._host or (self._disk is not None and block_hash in self._disk)

    def content(self) -> set[BlockHash]:
        """Hashes of all blocks in either tier."""
        return {*self._host.content(), *(self._disk.content() if self._disk is not None else ())}

    def is_worth_loading(self, num_blocks: int) -> bool:
        """Whether so long a run comes back faster than it is computed."""
        return num_blocks * self._block_size >= self._min_loaded_tokens

    def find_run(self, block_hashes: Sequence[BlockHash]) -> int:
        """How many of the leading blocks to bring back: all that are here, or none if they are too few."""
        num_found = next((index for index, name in enumerate(block_hashes) if name not in self), len(block_hashes))
        return num_found if self.is_worth_loading(num_found) else 0

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """These are wanted: they are the last to go, the first of them the very last."""
        for block_hash in reversed(block_hashes):
            if self._host.find(block_hash) is None and self._disk is not None and block_hash in self._disk:
                self._disk.touch(block_hash)

    # Out of the pool

    def save(self, blocks: Sequence[tuple[int, BlockHash]]) -> None:
        """Keep these blocks' content, which whatever is launched from now on may overwrite. Does not wait."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots: list[int] = []
        for block_id, block_hash in blocks:
            if self._host.find(block_hash) is None and (slot := self._host.borrow()) is not None:
                self._host.keep(slot, block_hash)
                pairs.append((self._slabs[block_id], self._host.tensor[slot]))
                slots.append(slot)
        if pairs:
            for slot in slots:
                if (last := self._last_copy.get(slot)) is not None and not last.is_done:
                    last.precede_steps()  # a load from a slot whose turn to go has come already
            self._start(self._saves, pairs, slots).precede_steps()
            self._num_saved += len(pairs)
            self._make_spare()

    # Into the pool

    def start_load(self, block_hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> PrefixLoad:
        """Bring a run back into blocks that nobody else reads or writes until the load is done or given up."""
        wait_s = self.token_s() * len(block_hashes) * self._block_size
        load = PrefixLoad(block_hashes=block_hashes, block_ids=block_ids, gives_up_at_s=self._clock() + wait_s)
        self.advance(load)
        return load

    def advance(self, load: PrefixLoad) -> None:
        """Start what can be started, and cut the load where nothing more comes."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots: list[int] = []
        for block_hash, block_id in islice(zip(load.block_hashes, load.block_ids, strict=True), load.num_started, None):
            slot = self._host.find(block_hash)
            if slot is None:
                break
            pairs.append((self._host.tensor[slot], self._slabs[block_id]))
            slots.append(slot)
        if pairs:
            load.copy = self._start(self._loads, pairs, slots)
            load.num_started += len(pairs)
        if not self._read_ahead(load) or (
            load.num_started < len(load.block_hashes) and self._clock() >= load.gives_up_at_s
        ):
            load.block_hashes = load.block_hashes[: load.num_started]
            load.block_ids = load.block_ids[: load.num_started]

    def finish(self, load: PrefixLoad) -> None:
        """Count a load that is done."""
        self.touch(load.block_hashes)
        num_read = sum(block_hash in load.read_hashes for block_hash in load.block_hashes)
        self._num_read += num_read
        self._num_loaded += len(load.block_hashes) - num_read

    def give_up(self, load: PrefixLoad) -> None:
        """Nobody wants the load any more: its blocks may be written by whatever is launched from now on."""
        if load.copy is not None:
            load.copy.precede_steps()

    def poll(self) -> None:
        """Note what the disk has done meanwhile. Costs nothing where that is nothing."""
        while self._departing and self._departing[0].is_right.done():
            move = self._departing.popleft()
            # What was forgotten meanwhile, or saved again, is not kept; nor is what the disk did not take.
            if self._settle(move) and move.block_hash in self and move.block_hash not in self._host:
                self._host.retire(move.slot, move.block_hash)
            else:
                self._host.give_back(move.slot)
        while self._arriving:
            move = next(iter(self._arriving.values()))
            if not move.is_right.done():
                break
            del self._arriving[move.block_hash]
            if self._settle(move) and move.block_hash in self and move.block_hash not in self._host:
                self._host.keep(move.slot, move.block_hash)
            else:
                self._host.give_back(move.slot)

    # All of it

    def forget_all(self) -> None:
        """Drop everything; nobody is told."""
        self._host.forget_all()
        if self._disk is not None:
            self._disk.forget_all()

    def host_stats(self) -> TierStats:
        return TierStats(
            num_blocks=self._host.num_slots,
            num_used_blocks=self._host.num_used,
            num_saved_blocks=self._num_saved,
            num_hit_tokens=self._num_loaded * self._block_size,
        )

    def disk_stats(self) -> TierStats:
        if self._disk is None:
            return TierStats()
        return TierStats(
            num_blocks=self._disk.num_slots,
            num_used_blocks=self._disk.num_used,
            num_saved_blocks=self._num_written,
            num_hit_tokens=self._num_read * self._block_size,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError: says which law is broken."""
        lent = [move.slot for move in (*self._departing, *self._arriving.values())]
        self._host.check_integrity(lent)
        if self._disk is not None:
            self._disk.check_integrity()

    def _start(
        self, copies: BlockCopies, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: Sequence[int]
    ) -> BlockCopy:
        copy = copies.start(pairs)
        self._last_copy.update(dict.fromkeys(slots, copy))
        return copy

    def _make_spare(self) -> None:
        """Have the disk's thread write what will go next, until enough slots can be lost."""
        if self._disk is None:
            return
        while self._host.num_spare + len(self._departing) < self._num_spare:
            oldest = self._host.borrow_oldest()
            if oldest is None:
                break
            block_hash, slot = oldest
            if block_hash in self._disk:
                self._disk.touch(block_hash)
                self._host.retire(slot, block_hash)
            else:
                written = self._disk.write(block_hash, self._host.view(slot), after=self._last_copy.get(slot))
                self._departing.append(_DiskMove(block_hash=block_hash, slot=slot, is_right=written))
                self._num_written += 1

    def _read_ahead(self, load: PrefixLoad) -> bool:
        """Ask the disk for what comes next in the load; False if that comes from nowhere."""
        wanted = load.block_hashes[load.num_started : load.num_started + MAX_READ_AHEAD]
        for block_hash in wanted:
            if block_hash in self._host:
                continue
            if block_hash not in self._arriving:
                if self._disk is None or block_hash not in self._disk or (slot := self._host.borrow()) is None:
                    break
                read = self._disk.read(block_hash, self._host.view(slot), after=self._last_copy.get(slot))
                self._arriving[block_hash] = _DiskMove(block_hash=block_hash, slot=slot, is_right=read)
            load.read_hashes.add(block_hash)
        return not wanted or wanted[0] in self._arriving

    def _settle(self, move: _DiskMove) -> bool:
        """Whether the disk's copy of a block is right; one that is not is forgotten."""
        is_right = move.is_right.result()
        if not is_right and self._disk is not None and move.block_hash in self._disk:
            self._disk.forget(move.block_hash)
            self._note_dropped(move.block_hash)
        return is_right

    def _note_dropped(self, block_hash: BlockHash) -> None:
        if block_hash not in self:
            self.on_drop(block_hash)


def open_cold_blocks(config: EngineConfig, cache: PagedKvCache) -> ColdBlocks | None:
    """The tiers that the settings ask for; None without host memory.

    Raises:
        ConfigError: names the setting that this machine cannot meet.
    """
    if not config.host_kv_cache_bytes:
        return None
    block_bytes = cache.layout.block_bytes
    num_host_slots = config.host_kv_cache_bytes // block_bytes
    needed = cache.layout.blocks_for(MIN_LOADED_TOKENS)
    if num_host_slots < needed:
        raise ConfigError(
            f"host_kv_cache_bytes is {config.host_kv_cache_bytes}, {num_host_slots} blocks; nothing shorter than "
            f"{needed} blocks is brought back ({needed * block_bytes} bytes)",
            param="host_kv_cache_bytes",
        )
    free = available_bytes()
    if config.host_kv_cache_bytes > free:
        raise ConfigError(
            f"host_kv_cache_bytes is {config.host_kv_cache_bytes}; {free} bytes are free", param="host_kv_cache_bytes"
        )
    if 0 < config.disk_kv_cache_bytes < block_bytes:
        raise ConfigError(
            f"disk_kv_cache_bytes is {config.disk_kv_cache_bytes}; one block takes {block_bytes}",
            param="disk_kv_cache_bytes",
        )
    return ColdBlocks(
        cache,
        BlockCopies(cache.tensor.device),
        BlockCopies(cache.tensor.device),
        num_host_slots=num_host_slots,
        num_disk_slots=config.disk_kv_cache_bytes // block_bytes,
        disk_directory=config.disk_kv_cache_dir,
    )
