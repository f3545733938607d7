"""A file of KV blocks that have left host memory too: which slot holds what, and one thread that reads and writes.

The file has no name and goes with the process: what it holds means nothing to another start. All reads and writes are
done in the order in which they were asked for, so a slot may be given away while its old content is still being read.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from weir.core.block_hash import BlockHash
from weir.core.errors import ConfigError
from weir.engine.block_copies import BlockCopy

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """One block in the file. `checksum` is set by the thread once the block is written."""

    slot: int
    checksum: int | None = None


class DiskBlocks:
    """Bounded by its file; the least recently used content makes room.

    Args:
        directory: where the file is made, at its full size.
        executor: does the reads and writes, one at a time and in order; None is a thread of its own.
        on_drop: told of content that made room for other.

    Raises:
        ConfigError: there is no such directory, or no room in it.
    """

    def __init__(
        self,
        directory: Path,
        num_slots: int,
        block_bytes: int,
        *,
        on_drop: Callable[[BlockHash], None],
        executor: Executor | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._block_bytes = block_bytes
        self._on_drop = on_drop
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disk")
        try:
            file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
            weakref.finalize(self, file.close)
        except OSError as exc:
            raise ConfigError(
                f"disk_kv_cache_dir: no file can be made in {directory}: {exc.strerror}", param="disk_kv_cache_dir"
            ) from exc
        self._file = file
        try:
            _allocate(file.fileno(), num_slots * block_bytes)
        except OSError as exc:
            raise ConfigError(
                f"disk_kv_cache_bytes: {directory} has no room for {num_slots} blocks, "
                f"{num_slots * block_bytes} bytes: {exc.strerror}; {shutil.disk_usage(directory).free} are free",
                param="disk_kv_cache_bytes",
            ) from exc
        self._free = list(reversed(range(num_slots)))
        self._entries: OrderedDict[BlockHash, _Entry] = OrderedDict()
        """The least recently used first."""

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def num_used(self) -> int:
        return len(self._entries)

    def content(self) -> Iterable[BlockHash]:
        return self._entries.keys()

    def touch(self, block_hash: BlockHash) -> None:
        """Content that is here is the last to go."""
        self._entries.move_to_end(block_hash)

    def write(self, block_hash: BlockHash, source: memoryview, *, after: BlockCopy | None) -> Future[bool]:
        """Store content that is not here; it can be read from now on. The future says whether it went well.

        Args:
            source: one block, which nobody writes until the future is done.
            after: the copy that fills it.
        """
        assert block_hash not in self._entries, "two disk slots for one content"
        if not self._free:
            dropped, oldest = self._entries.popitem(last=False)
            self._free.append(oldest.slot)
            self._on_drop(dropped)
        entry = self._entries[block_hash] = _Entry(self._free.pop())
        return self._executor.submit(self._write, entry, source, after)

    def read(self, block_hash: BlockHash, destination: memoryview, *, after: BlockCopy | None) -> Future[bool]:
        """Read content that is here. The future says whether these are the bytes that were written.

        Args:
            destination: one block, which nobody else touches until the future is done.
            after: the last copy out of it.
        """
        self._entries.move_to_end(block_hash)
        return self._executor.submit(self._read, self._entries[block_hash], destination, after)

    def forget(self, block_hash: BlockHash) -> None:
        """Drop content that turned out to be damaged; nobody is told."""
        entry = self._entries.pop(block_hash, None)
        if entry is not None:
            self._free.append(entry.slot)

    def forget_all(self) -> None:
        """Drop everything; nobody is told."""
        self._free.extend(entry.slot for entry in self._entries.values())
        self._entries.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError: says which law is broken."""
        slots = [*self._free, *(entry.slot for entry in self._entries.values())]
        assert sorted(slots) == list(range(self.num_slots)), "a disk slot is lost, or is two things at once"

    # In the thread

    def _write(self, entry: _Entry, source: memoryview, after: BlockCopy | None) -> bool:
        if after is not None:
            after.wait()
        done = 0
        try:
            self._file.seek(entry.slot * self._block_bytes)
            while done < len(source):
                done += self._file.write(source[done:])
        except OSError as exc:
            logger.warning("a KV block could not be written to disk: %s", exc.strerror)
            return False
        entry.checksum = xxh3_64_intdigest(source)
        return True

    def _read(self, entry: _Entry, destination: memoryview, after: BlockCopy | None) -> bool:
        if after is not None:
            after.wait()
        done = 0
        try:
            self._file.seek(entry.slot * self._block_bytes)
            while (count := self._file.readinto(destination[done:])) > 0:
                done += count
        except OSError as exc:
            logger.warning("a KV block could not be read from disk: %s", exc.strerror)
            return False
        is_right = entry.checksum == xxh3_64_intdigest(destination)
        if not is_right and entry.checksum is not None:
            logger.warning("a KV block came back from disk with other bytes; it is computed again")
        return is_right


def _allocate(fd: int, size_bytes: int) -> None:
    """Take the whole room now, where the system can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
    else:
        os.ftruncate(fd, size_bytes)
