"""One kernel with the types, constants and options of one launch of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel as it is launched.

    Attributes:
        types: of the arguments that are no constants; a pointer or a stride is a multiple of 16.
        aligned: other arguments that are multiples of 16.
        amd_options, amd_constants: what an AMD GPU has instead.
        amd_constants: Mapping[str, object] = field(default_factory=dict)
    not_on: names of GPUs that it can't be compiled for.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: frozenset[str] = frozenset()
    options: Mapping[str, int] = field(default_factory=dict)
    amd_options: Mapping[str, int] = field(default_factory=dict)
    amd_constants: Mapping[str, object] = field(default_factory=dict)
    not_on: frozenset[str] = frozenset()
