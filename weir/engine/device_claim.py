"""Which GPU a worker takes: one that has room for its share of memory, by a ledger that all workers of a host keep.

The ledger is a directory with a file for each live claim, locked by its process for as long as that lives: a claim ends
with its process, however that ends. Containers of one host share the ledger by sharing the directory. It knows GPUs by
their names only.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TOLERANCE = 1e-6
"""Shares that should add up to one may miss it by this much."""


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """A share of one GPU; ends with `release`, or with the process.

    Attributes:
        name: of the GPU.
    """

    name: str
    path: Path
    descriptor: int

    def release(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self.descriptor)


class DeviceLedger:
    """Claims of one host.

    Args:
        directory: made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def claim_emptiest(self, names: Sequence[str], share: float) -> DeviceClaim | None:
        """Claim `share` of the memory of the GPU that has most left, of equal ones the first; None if none has room."""
        with self._locked():
            claimed = self._claimed()
            best = min(names, key=lambda name: claimed[name], default=None)
            if best is None or claimed[best] + share > 1 + _TOLERANCE:
                return None
            return self._add(best, share)

    def claim(self, name: str, share: float) -> DeviceClaim:
        """Write down that `share` of a GPU is taken, whatever others take of it."""
        with self._locked():
            return self._add(name, share)

    def claimed(self) -> Mapping[str, float]:
        """The share of each GPU that live workers take."""
        with self._locked():
            return self._claimed()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _claimed(self) -> Counter[str]:
        """Removes the claims of processes that are gone."""
        total: Counter[str] = Counter()
        for path in sorted(self._directory.glob("*.claim")):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                entry = json.loads(path.read_text())
                total[entry["gpu"]] += entry["share"]
            else:
                path.unlink()
            finally:
                os.close(descriptor)
        return total

    def _add(self, name: str, share: float) -> DeviceClaim:
        number = next(n for n in range(1 << 20) if not (self._directory / f"{n}.claim").exists())
        path = self._directory / f"{number}.claim"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps({"gpu": name, "share": share, "pid": os.getpid()}).encode())
        return DeviceClaim(name, path, descriptor)
