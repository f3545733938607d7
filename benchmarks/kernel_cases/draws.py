"""Choosing tokens, and verifying drafts of them. Results are tokens: the error is the share of them that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from benchmarks.floor import Floor
from benchmarks.kernel_cases.work import KernelCase, Trial, Work
from kernels.gpu.rejection_sample import rejection_sample_triton
from kernels.gpu.sample import pack_draws, sample_triton
from kernels.rejection_sample import rejection_sample_reference
from kernels.sample import Draw, sample_reference

VOCAB_SIZE = 128_256
SCORE_BYTES = 4


def _draws(num_rows: int, *, temperature: float, top_p: float, repeats: int = 1) -> list[Draw]:
    return [
        Draw(
            row=row,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            min_p=0.0,
            seed=row // repeats,
            choice_index=0,
            position=100 + row % repeats,
        )
        for row in range(num_rows)
    ]


def _share_that_differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found != expected).float().mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Work):
    kernels: ClassVar = ("sample", "noise")
    does: ClassVar = "temperature, top-p and one draw a row, without a sort"
    bytes_formula: ClassVar = "4 · rows · vocabulary"
    tolerance: ClassVar = 0.05

    num_rows: int
    vocab_size: int
    top_p: float

    @property
    def shape(self) -> str:
        return f"{self.num_rows:,} rows of {self.vocab_size:,} scores, temperature 0.8, top-p {self.top_p:g}"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=SCORE_BYTES * self.num_rows * self.vocab_size)

    def make(self, device: torch.device) -> Trial:
        scores = 3 * torch.randn(self.num_rows, self.vocab_size, device=device)
        draws = _draws(self.num_rows, temperature=0.8, top_p=self.top_p)
        packed = pack_draws(draws, self.vocab_size).to(device)

        def launch() -> torch.Tensor:
            return sample_triton(scores, packed, is_truncated=self.top_p < 1)[0]

        return Trial(launch=launch, error=lambda: _share_that_differs(launch(), sample_reference(scores, draws)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionSample(Work):
    kernels: ClassVar = ("rejection_sample", "noise")
    does: ClassVar = "drafted tokens accepted or replaced, so that the output is distributed as without drafts"
    bytes_formula: ClassVar = "4 · sequences · (2 · drafts + 1) · vocabulary"
    tolerance: ClassVar = 0.05

    num_seqs: int
    num_drafts: int
    vocab_size: int

    @property
    def shape(self) -> str:
        return f"{self.num_seqs:,} sequences of {self.num_drafts} drafts, {self.vocab_size:,} scores"

    @property
    def floor(self) -> Floor:
        return Floor(num_bytes=SCORE_BYTES * self.num_seqs * (2 * self.num_drafts + 1) * self.vocab_size)

    def make(self, device: torch.device) -> Trial:
        rows = self.num_drafts + 1
        logits = 3 * torch.randn(self.num_seqs * rows, self.vocab_size, device=device)
        draft_probs = torch.softmax(logits.view(self.num_seqs, rows, -1)[:, :-1] / 2, dim=-1)
        drafts = draft_probs.argmax(-1)
        draws = _draws(self.num_seqs * rows, temperature=0.8, top_p=1.0, repeats=rows)
        packed = pack_draws(draws, self.vocab_size).to(device)

        def launch() -> torch.Tensor:
            return rejection_sample_triton(drafts, draft_probs, logits, packed)[0]

        def expected() -> torch.Tensor:
            return rejection_sample_reference(drafts, draft_probs, logits, draws).token_ids

        return Trial(launch=launch, error=lambda: _share_that_differs(launch(), expected()))


def cases() -> Iterator[KernelCase]:
    small = Sample(num_rows=2, vocab_size=5000, top_p=0.9)
    for name, top_p in (("64 rows, top-p", 0.9), ("64 rows", 1.0)):
        work = Sample(num_rows=64, vocab_size=VOCAB_SIZE, top_p=top_p)
        yield KernelCase(op="sample", name=name, work=work, small=small)
    yield KernelCase(
        op="rejection_sample",
        name="64 sequences",
        work=RejectionSample(num_seqs=64, num_drafts=4, vocab_size=VOCAB_SIZE),
        small=RejectionSample(num_seqs=2, num_drafts=2, vocab_size=3000),
    )
