"""Weir: disaggregated serving of open-weight language models.

The package that gateway, prefill and decode share. Importing it costs nothing: the offline API is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weir.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from weir.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'weir' has no attribute {name!r}")
