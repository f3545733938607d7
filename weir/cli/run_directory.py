"""Where one `weir up` keeps its logs and sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

NUM_KEPT = 10
MAX_SOCKET_DIR_CHARS = 80
"""The path of a Unix socket is limited to about 104 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Attributes:
    path: holds `<process>.log`.
    sockets: holds Unix sockets; elsewhere when `path` is too long for one.
    lock: of `path`, held until this process ends.
    """

    path: Path
    sockets: Path
    lock: int | None = None

    @classmethod
    def create(cls, home: Path) -> RunDirectory:
        """A new one under `home`/run, open to this user only; of those whose run has ended all but the last few go."""
        parent = home / "run"
        parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(entry for entry in parent.iterdir() if entry.is_dir())[:-NUM_KEPT]:
            if (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        is_short = len(os.fsencode(path)) <= MAX_SOCKET_DIR_CHARS
        sockets = path if is_short else Path(tempfile.mkdtemp(prefix="weir-"))
        return cls(path=path, sockets=sockets, lock=_lock(path))

    def remove_sockets(self) -> None:
        """At the end of the run; the logs stay, until later runs have taken their place."""
        if self.lock is not None:
            os.close(self.lock)
        if self.sockets != self.path:
            shutil.rmtree(self.sockets, ignore_errors=True)
            return
        for entry in self.path.glob("*.sock"):
            entry.unlink(missing_ok=True)


def _lock(path: Path) -> int | None:
    """The open, locked directory; None where another run has it. The lock ends with its process, however that ends."""
    descriptor: int | None = None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    if descriptor is not None:
        os.close(descriptor)
    return None
