"""Memory that is read in a small part of every page at each step, on pages of 2 MiB where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress


def prefer_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for them before the mapping is first touched; a system without them serves the same bytes, slower."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
