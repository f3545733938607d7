"""A cache as workers of other hosts read it: NIXL, over RDMA where both have it and over what UCX finds where not.

The library is used in one thread alone, since a call of it may block for a while: it posts what was asked for, as one
transfer for each peer, and asks after those under way until they are over. What a peer's death leaves unread ends when
the library notices, over UCX after up to 20 s; until then nobody gets the memory that was being written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

import torch

from weir.core.errors import ConfigError, UnavailableError
from weir.engine.paged_kv_cache import PagedKvCache

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_POLL_S = 50e-6


def load_nixl() -> Any:
    """The library's Python interface. Raises ConfigError where it is not installed."""
    for name in _PACKAGES:
        try:
            nixl = importlib.import_module(f"{name}._api")
        except ImportError as exc:
            error = exc
            continue
        its_logger = logging.getLogger("nixl")  # it writes to stdout, in its own form
        its_logger.handlers.clear()
        its_logger.propagate = True
        its_logger.setLevel(logging.WARNING)
        return nixl
    raise ConfigError(
        f"transfer_memory: 'nixl' needs the package nixl, which cannot be imported here: {error}",
        param="transfer_memory",
    )


class NixlMemory:
    """A `PeerMemory` that NIXL reads.

    Attributes:
        agent: the peer's.
        address, device, memory_type: of its cache, as the peer names them.
    """

    def __init__(self, thread: NixlThread, fields: dict[str, Any]) -> None:
        self.agent = ""
        self.address, self.device = int(fields["address"]), int(fields["device"])
        self.memory_type = str(fields["memory_type"])
        self.size_bytes = int(fields["size_bytes"])
        self.is_lost = False
        self._thread = thread

    def read(self, offset: int, destination: torch.Tensor) -> Future[None]:
        """See PeerMemory."""
        read = _Read(self, offset, destination)
        self._thread.put(read)
        return read.over


class NixlSharing:
    """A `MemorySharing` between processes with the same NIXL.

    Raises:
        ConfigError: NIXL is not installed, or does not work here.
    """

    def __init__(self, cache: PagedKvCache) -> None:
        nixl = load_nixl()
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            self._agent = nixl.nixl_agent(f"weir-{uuid.uuid4()}", config)
            self._registration = self._agent.register_memory(cache.tensor)
        except Exception as exc:
            raise ConfigError(f"transfer_memory: 'nixl' does not work here: {exc!r}", param="transfer_memory") from exc
        self.domain = f"nixl-{_version()}"
        self._cache = cache
        self._thread = NixlThread(self._agent)
        self._num_mapped: dict[str, int] = {}  # by agent; only in the thread

    def export(self) -> bytes:
        """See MemorySharing."""
        tensor = self._cache.tensor
        memory_type, device = _place(tensor)
        return json.dumps(
            {
                "agent": self._thread.call(self._agent.get_agent_metadata).hex(),
                "memory_type": memory_type,
                "device": device,
                "address": tensor.data_ptr(),
                "size_bytes": tensor.nbytes,
            }
        ).encode()

    def map(self, handle: bytes) -> NixlMemory:
        """See MemorySharing."""
        try:
            fields: dict[str, Any] = json.loads(handle)
            metadata = bytes.fromhex(fields["agent"])
            memory = NixlMemory(self._thread, fields)
            memory.agent = self._thread.call(lambda: self._add(metadata))
        except Exception as exc:
            raise UnavailableError(f"the handle of a peer's KV memory: {exc!r}") from exc
        weakref.finalize(memory, self._forget, memory.agent).atexit = False
        return memory

    def close(self) -> None:
        """See MemorySharing."""
        self._thread.close()
        self._agent.deregister_memory(self._registration)

    def _add(self, metadata: bytes) -> str:
        name: str = self._agent.add_remote_agent(metadata).decode()
        self._num_mapped[name] = self._num_mapped.get(name, 0) + 1
        return name

    def _forget(self, name: str) -> None:
        with contextlib.suppress(UnavailableError):  # closed
            self._thread.put(lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        """A peer that was mapped again meanwhile, after its connection broke, stays."""
        self._num_mapped[name] -= 1
        if not self._num_mapped[name]:
            del self._num_mapped[name]
            self._agent.remove_remote_agent(name)


class NixlThread:
    """The one thread in which an agent is used."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._jobs: SimpleQueue[_Read | Callable[[], object] | None] = SimpleQueue()
        self._under_way: list[_Transfer] = []
        self._is_closed = False
        self._closing = Lock()
        self._thread = Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def put(self, job: _Read | Callable[[], object]) -> None:
        """Do it soon; never blocks. Raises UnavailableError once closed."""
        with self._closing:
            if self._is_closed:
                raise UnavailableError("NIXL is closed")
            self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the thread; blocks."""
        result: Future[T] = Future()

        def job() -> None:
            try:
                result.set_result(function())
            except Exception as exc:  # noqa: BLE001 - its errors have no class in common
                result.set_exception(exc)

        self.put(job)
        return result.result()

    def close(self) -> None:
        """End the thread; nobody waits for a read any more."""
        with self._closing:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_turn():  # which keeps no peer's memory alive in between
            pass

    def _take_turn(self) -> bool:
        reads: dict[NixlMemory, list[_Read]] = {}
        for job in self._take():
            if job is None:
                return False
            if isinstance(job, _Read):
                reads.setdefault(job.memory, []).append(job)
            else:
                self._do(job)
        for memory, batch in reads.items():
            self._post(memory, batch)
        self._under_way = [transfer for transfer in self._under_way if not self._has_ended(transfer)]
        return True

    def _take(self) -> list[_Read | Callable[[], object] | None]:
        """All that is to do; waits for it, but only for a moment while there are transfers to ask after."""
        jobs = []
        with contextlib.suppress(Empty):
            jobs.append(self._jobs.get(timeout=_POLL_S if self._under_way else None))
            while True:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:
            logger.warning("NIXL: a peer that is gone cannot be removed", exc_info=True)

    def _post(self, memory: NixlMemory, reads: list[_Read]) -> None:
        memory_type, device = _place(reads[0].destination)
        here = [(read.destination.data_ptr(), len(read.destination), device) for read in reads]
        there = [(memory.address + read.offset, len(read.destination), memory.device) for read in reads]
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(here, memory_type),
                self._agent.get_xfer_descs(there, memory.memory_type),
                memory.agent,
            )
        except Exception as exc:  # noqa: BLE001 - its errors have no class in common
            _end(reads, exc)
            return
        transfer = _Transfer(handle, reads)
        transfer.ask(self._agent.transfer)
        self._under_way.append(transfer)

    def _has_ended(self, transfer: _Transfer) -> bool:
        if transfer.is_running:
            transfer.ask(self._agent.check_xfer_state)
        if transfer.is_running:
            return False
        try:
            self._agent.release_xfer_handle(transfer.handle)
        except Exception:  # noqa: BLE001 - it may write still: only what is released is over
            return False
        _end(transfer.reads, transfer.error)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    memory: NixlMemory
    offset: int
    destination: torch.Tensor
    over: Future[None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Transfer:
    """Reads of one peer that were posted together, and end together."""

    handle: Any
    reads: list[_Read]
    is_running: bool = True
    error: Exception | None = None

    def ask(self, question: Callable[[Any], str]) -> None:
        """Take what the library says of it now."""
        try:
            state = question(self.handle)
        except Exception as exc:  # noqa: BLE001 - its errors have no class in common
            state, self.error = "ERR", exc
        self.is_running = state == "PROC"
        if state == "ERR":
            self.error = self.error or RuntimeError("NIXL says no more than that")


def _end(reads: list[_Read], error: Exception | None) -> None:
    for read in reads:
        if error is None:
            read.over.set_result(None)
        else:
            read.memory.is_lost = True
            read.over.set_exception(UnavailableError(f"the KV memory of a peer cannot be read: {error!r}"))


def _place(tensor: torch.Tensor) -> tuple[str, int]:
    """NIXL's names of a tensor's memory type and device."""
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)


def _version() -> str:
    """Of the first of the packages that is installed."""
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    raise AssertionError("its module was imported")
