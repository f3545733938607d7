"""Laws of importing something as if an optional library were not installed."""

from __future__ import annotations

import sys

import pytest

from weir.cluster.absent_module import without_module

OPTIONAL = "xml.sax.expatreader"


def test_it_cannot_be_imported_inside_and_can_be_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, OPTIONAL, raising=False)
    with without_module(OPTIONAL), pytest.raises(ImportError):
        __import__(OPTIONAL)
    __import__(OPTIONAL)
    assert OPTIONAL in sys.modules


def test_what_is_loaded_already_stays() -> None:
    with without_module("sys"):
        assert __import__("sys") is sys
    assert sys.modules["sys"] is sys
