"""Whole blocks of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import KernelCase, Trial, Work
from kernels.gpu.copy_blocks import copy_rows_triton


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocks(Work):
    """Half of the blocks, in random order, onto the other half."""

    kernels: ClassVar = ("copy_blocks",)
    does: ClassVar = "whole blocks to other places of the cache; gathered and scattered blocks are the same kernel"
    bytes_formula: ClassVar = "2 · copies · bytes of a block"
    tolerance: ClassVar = 0.0

    num_copies: int
    block_bytes: int

    @property
    def shape(self) -> str:
        return f"{self.num_copies} blocks of {self.block_bytes:,} bytes"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=2 * self.num_copies * self.block_bytes)

    def make(self, device: torch.device) -> Trial:
        shape = (2 * self.num_copies, self.block_bytes)
        cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        sources, destinations = torch.randperm(2 * self.num_copies, device=device).view(2, -1)
        launch = partial(copy_rows_triton, cache, sources, cache, destinations)

        def error() -> float:
            before = cache.clone()
            launch()
            is_copied = torch.equal(cache[destinations], before[sources])
            is_untouched = torch.equal(cache[sources], before[sources])
            return 0.0 if is_copied and is_untouched else float("inf")

        return Trial(launch=launch, error=error)


def cases() -> Iterator[KernelCase]:
    yield KernelCase(
        op="copy_blocks",
        name="256 blocks of Llama-3-8B",
        work=CopyBlocks(num_copies=256, block_bytes=32 * 2 * 8 * 16 * 128 * 2),
        small=CopyBlocks(num_copies=3, block_bytes=80),
    )
