"""What a case of a kernel is made of. Knows no clock and no card."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from benchmarks.floor import Floor
from tests.kernels.paged_pool import TOLERANCE

DTYPE = torch.bfloat16
ELEMENT_BYTES = DTYPE.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One set of inputs on a device.

    Attributes:
        launch: the kernel, as often as one likes.
        error: how far it is from its plain counterpart on the same inputs, by `rms_ratio`.
        rivals: what else does the same, by name.
    """

    launch: Callable[[], object]
    error: Callable[[], float]
    rivals: Mapping[str, Callable[[], object]] = field(default_factory=dict)


class Work(ABC):
    """An op at one shape; its attributes are the sizes.

    Attributes:
        kernels: the files of `kernels/gpu` that do it.
        does: in a few words.
        bytes_formula, flops_formula: `floor` for people.
        tolerance: the largest error.
    """

    kernels: ClassVar[tuple[str, ...]]
    does: ClassVar[str]
    bytes_formula: ClassVar[str]
    flops_formula: ClassVar[str] = "–"
    tolerance: ClassVar[float] = TOLERANCE[DTYPE]

    @property
    @abstractmethod
    def shape(self) -> str:
        """The sizes, for people."""

    @property
    @abstractmethod
    def floor(self) -> Floor: ...

    @property
    def least_capability(self) -> tuple[int, int]:
        """Of an NVIDIA GPU that can do it."""
        return (0, 0)

    @abstractmethod
    def make(self, device: torch.device) -> Trial:
        """Random inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A line of the table.

    Attributes:
        op: the public function, `kernels.<op>`.
        small: the same work where a processor interprets the kernel.
        goal: share of what the card can do.
        is_timed: else only its results are looked at.
    """

    op: str
    name: str
    work: Work
    small: Work
    goal: float | None = None
    is_timed: bool = True

    @property
    def title(self) -> str:
        return f"{self.op}, {self.name}"


def random_rows(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """Normal, of `DTYPE`."""
    return torch.randn(shape, device=device, dtype=DTYPE) * scale
