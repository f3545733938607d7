"""Tests that read another process's memory over NIXL run where it is installed: on Linux, after `make`."""

from __future__ import annotations

import pytest

from weir.core.errors import ConfigError
from weir.engine.nixl_sharing import load_nixl


def _has_nixl() -> bool:
    try:
        load_nixl()
    except ConfigError:
        return False
    return True


needs_nixl = pytest.mark.skipif(not _has_nixl(), reason="needs nixl, which is for Linux only")
