"""Where one `weir up` keeps its logs and sockets."""

from __future__ import annotations

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
    """

    path: Path
    sockets: Path

    @classmethod
    def create(cls, home: Path) -> RunDirectory:
        """A new one under `home`/run, open to this user only; of the older ones all but the last few are removed."""
        parent = home / "run"
        parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(entry for entry in parent.iterdir() if entry.is_dir())[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        is_short = len(os.fsencode(path)) <= MAX_SOCKET_DIR_CHARS
        return cls(path=path, sockets=path if is_short else Path(tempfile.mkdtemp(prefix="weir-")))

    def remove_sockets(self) -> None:
        """At the end of the run; the logs stay."""
        if self.sockets != self.path:
            shutil.rmtree(self.sockets, ignore_errors=True)
            return
        for entry in self.path.glob("*.sock"):
            entry.unlink(missing_ok=True)
