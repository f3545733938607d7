"""One kernel with the types, constants and options of one launch of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel as it is launched.

    Attributes:
        types: of the arguments that are no constants; a pointer or a stride is a multiple of 16.
        aligned: other arguments that are multiples of 16.
        amd_options, amd_constants: what an AMD GPU has instead.
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


def over_caches(case: Case) -> Iterator[Case]:
    """`case` over the cache that its types say, which has no scales, and over one of float8."""
    yield replace(case, constants={**case.constants, "scales_ptr": None})
    types = {**case.types, **dict.fromkeys(("k_ptr", "v_ptr"), "*fp8e4nv"), "scales_ptr": "*fp32"}
    yield replace(case, name=f"{case.name}, float8", types=types, not_on=case.not_on | {"sm_80"})
