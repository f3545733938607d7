"""Keeps a library from loading an optional one that nobody here uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_module(name: str) -> Iterator[None]:
    """Imports in the body find that `name` is not installed; no effect where it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
