"""Slots of host memory for KV blocks that have left the worker's pool: which holds what, and which goes next.

It knows neither devices nor files: whoever copies asks for slots here, and says when a slot is in the hands of somebody
who reads or writes it beside the steps.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import torch

from weir.core.block_hash import BlockHash
from weir.core.errors import ConfigError


class HostBlocks:
    """A slot is free, or holds content that can be found, or is lent: then only its borrower may touch it.

    Content that is elsewhere too can be retired: it is still found, and goes before all other.

    Args:
        num_slots: blocks of host memory.
        block_bytes: bytes of one.
        device: the memory is pinned for this one, if it is no CPU.
        on_drop: told of content that made room for other.

    Attributes:
        tensor: [num_slots, block_bytes] uint8.

    Raises:
        ConfigError: the memory cannot be pinned.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, device: torch.device, *, on_drop: Callable[[BlockHash], None]
    ) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        self._on_drop = on_drop
        mapping = mmap.mmap(-1, num_slots * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = memoryview(mapping)
        self.tensor = torch.frombuffer(self._bytes, dtype=torch.uint8).view(num_slots, block_bytes)
        if device.type == "cuda":
            _pin(self.tensor)
        self.tensor.zero_()  # taken now, so that it is not missing in the middle of a stream
        self._free = list(reversed(range(num_slots)))
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()
        """The least recently used first."""
        self._retired: OrderedDict[BlockHash, int] = OrderedDict()
        self._lent: set[int] = set()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slot_of or block_hash in self._retired

    @property
    def num_spare(self) -> int:
        """Slots whose loss is none: free ones and those of retired content."""
        return len(self._free) + len(self._retired)

    @property
    def num_used(self) -> int:
        return len(self._slot_of) + len(self._retired)

    def content(self) -> Iterable[BlockHash]:
        yield from self._slot_of
        yield from self._retired

    def find(self, block_hash: BlockHash) -> int | None:
        """The slot that holds this content, which is now the last to go."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is None:
            slot = self._retired.pop(block_hash, None)
        if slot is not None:
            self._slot_of[block_hash] = slot
        return slot

    def borrow(self) -> int | None:
        """A slot for new content, for which other makes room if need be. None when every slot is lent."""
        if self._free:
            slot = self._free.pop()
        elif content := self._retired or self._slot_of:
            dropped, slot = content.popitem(last=False)
            self._on_drop(dropped)
        else:
            return None
        self._lent.add(slot)
        return slot

    def borrow_oldest(self) -> tuple[BlockHash, int] | None:
        """The least recently used content and its slot, where it is not found now. None when all is retired."""
        if not self._slot_of:
            return None
        oldest = self._slot_of.popitem(last=False)
        self._lent.add(oldest[1])
        return oldest

    def keep(self, slot: int, block_hash: BlockHash) -> None:
        """A lent slot holds this content from now on, and is the last to go."""
        assert block_hash not in self, "two slots for one content"
        self._lent.remove(slot)
        self._slot_of[block_hash] = slot

    def retire(self, slot: int, block_hash: BlockHash) -> None:
        """A lent slot holds this content from now on, and goes before all that is not retired."""
        assert block_hash not in self, "two slots for one content"
        self._lent.remove(slot)
        self._retired[block_hash] = slot

    def give_back(self, slot: int) -> None:
        """A lent slot holds nothing."""
        self._lent.remove(slot)
        self._free.append(slot)

    def forget_all(self) -> None:
        """Drop all that can be found; nobody is told."""
        for content in (self._slot_of, self._retired):
            self._free.extend(content.values())
            content.clear()

    def view(self, slot: int) -> memoryview:
        """The bytes of one slot, writable."""
        return self._bytes[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def check_integrity(self, lent: Collection[int]) -> None:
        """Raises AssertionError: says which law is broken. `lent` are the slots that somebody has."""
        assert sorted(lent) == sorted(self._lent), "a host slot is lent to nobody, or to two"
        assert not self._slot_of.keys() & self._retired.keys(), "two slots for one content"
        slots = [*self._free, *self._slot_of.values(), *self._retired.values(), *self._lent]
        assert sorted(slots) == list(range(self.num_slots)), "a host slot is lost, or is two things at once"


def _pin(tensor: torch.Tensor) -> None:
    """Lock these pages, so that a device copies to and from them by itself."""
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(error) != 0:
        raise ConfigError(
            f"host_kv_cache_bytes: {tensor.numel()} bytes of host memory cannot be pinned (CUDA error {int(error)})",
            param="host_kv_cache_bytes",
        )
